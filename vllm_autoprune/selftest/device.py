"""Selections on a GPU, without an engine: the host's tokens, and no waiting for the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median

import torch

from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import load_state, shipped_states
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.safety import safety_check, synthetic_probes
from vllm_autoprune.tpdsl.state import PruningState

BUDGET = 64

MINIMUM_SHARE = 0.9
"""Share of the host's tokens that a device must keep. A device adds products in another order, so a
few tokens of nearly equal rank change places."""

ROUNDS = 5

WAITING = frozenset({"prunesid"})
"""Base policies that wait for a GPU: torch.linalg.eigh reads its error codes on the host."""

KERNEL = "greedy selection in Triton"


@dataclass(frozen=True, slots=True)
class _SelectionResult:
    """Result of one state on the device.

    ``share`` is that of the host's tokens which the device keeps. ``seconds`` is the median time of
    a selection on two images of slightly more than K tokens. ``wrong`` says what is wrong, or is
    empty.
    """

    name: str
    share: float
    seconds: float
    wrong: str


def find_gpu() -> torch.device | None:
    """This machine's CUDA device, or None."""
    return torch.device("cuda") if torch.cuda.is_available() else None


def check_kernel(device: torch.device) -> str:
    """What is wrong with the Triton kernels on this device, or an empty text."""
    if device.type != "cuda":
        return "runs on a GPU only"
    try:
        from vllm_autoprune.ops import dpp_triton, exchange_triton, farthest_triton
    except ImportError as error:
        return f"cannot be imported: {error}"
    kernels = (dpp_triton, farthest_triton, exchange_triton)
    works = [kernel.works() for kernel in kernels]
    return "" if all(works) else "does not work: the log says why"


def check_selections(device: torch.device) -> Iterator[_SelectionResult]:
    """The result of every base policy under the shipped state, then of every shipped state."""
    shipped = load_state("autoprune").model_dump(mode="json")
    states = {
        base: PruningState.model_validate(
            {**shipped, "base_policy": {"name": base, "params": {}}}
        )
        for base in sorted(BASE_POLICIES)
    }
    states |= {
        name: load_state(name)
        for name in sorted(shipped_states().keys() - states.keys())
    }
    synchronize: Callable[[], None] = lambda: None  # noqa: E731
    if device.type == "cuda":
        synchronize = torch.cuda.synchronize
    for name, state in states.items():
        try:
            policy = materialize(state, BUDGET)
            may_wait = policy.state.base_policy.name in WAITING
            probes = synthetic_probes(BUDGET, device)
            # Only the first probe has tokens of different rank everywhere.
            expected = refine(policy, synthetic_probes(BUDGET)[0]).indices
            selected = refine(policy, probes[0]).indices.cpu()
            is_selected = (expected[:, :, None] == selected[:, None, :]).any(dim=2)
            share = float(is_selected.float().mean())
            seconds = []
            for _ in range(ROUNDS):
                synchronize()
                start = time.perf_counter()
                with nullcontext() if may_wait else _forbid_waiting(device):
                    refine(policy, probes[0])
                synchronize()
                seconds.append(time.perf_counter() - start)
            wrong = [
                f"{v.name}: {v.detail}" for v in safety_check(policy, probes).failures()
            ]
        # Whatever a device or its driver raises is a result of this check.
        except Exception as error:  # noqa: BLE001
            yield _SelectionResult(name, 0.0, 0.0, f"{type(error).__name__}: {error}")
            continue
        if share < MINIMUM_SHARE:
            wrong.append(f"{share:.0%} of the host's tokens are kept")
        yield _SelectionResult(name, share, median(seconds), "; ".join(wrong))


@contextmanager
def _forbid_waiting(device: torch.device) -> Iterator[None]:
    """Make torch raise, while the context is open, when the host waits for a GPU."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
