"""Peak memory of a served model beyond its weights and its KV cache.

vLLM takes its share of the GPU whatever it serves, so that the memory which the driver reports says
nothing. The worker gets two methods from ``--worker-extension-cls``, which its development endpoint
``/collective_rpc`` calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import BenchmarkError
from benchmarks.server import Server

MEMORY_FLAGS = ("--worker-extension-cls", f"{__name__}.PeakMemory")
"""Flags of a server whose memory is read."""
MEMORY_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
}
"""Its environment: the endpoint, and where its worker imports this module from."""


class PeakMemory:
    """Methods that vLLM adds to its worker."""

    model_runner: Any

    def begin_peak_memory(self) -> None:
        """Forget the peak so far."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def read_peak_memory(self) -> dict[str, int] | None:
        """Bytes of the peak of all tensors, of weights and of the KV cache; None without a GPU."""
        if not torch.cuda.is_available():
            return None
        model = self.model_runner.get_model()
        return {
            "peak": torch.cuda.max_memory_allocated(),
            "weights": _count_bytes([*model.parameters(), *model.buffers()]),
            "cache": _count_bytes(_find_tensors(self.model_runner.kv_caches)),
        }


def begin_peak_memory(server: Server) -> None:
    """Let a server forget its peak so far; raises :class:`BenchmarkError` if it refuses."""
    _call(server, "begin_peak_memory")


def read_peak_memory(server: Server) -> int | None:
    """Bytes at the peak beyond weights and KV cache, of the fullest worker; None without a GPU."""
    workers = [worker for worker in _call(server, "read_peak_memory") if worker]
    return max(
        (worker["peak"] - worker["weights"] - worker["cache"] for worker in workers),
        default=None,
    )


def _call(server: Server, method: str) -> list[Any]:
    """Results of a method of all workers."""
    status, answer = server.post("/collective_rpc", {"method": method})
    if status != 200:
        raise BenchmarkError.of(server.url, f"{method}: status {status}: {answer}")
    results = answer["results"]
    assert isinstance(results, list)
    return results


def _find_tensors(caches: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors of a list of caches, of which layers of linear attention have several."""
    for cache in caches:
        if isinstance(cache, Tensor):
            yield cache
        else:
            yield from _find_tensors(cache)


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind tensors, shared memory counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())
