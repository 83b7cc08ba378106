"""Busy shares of a server's processes, of this process and of the GPU, over a stretch of time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from statistics import mean
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]

from benchmarks.server import Server
from vllm_autoprune.record_file import FrozenModel

_INTERVAL = 0.2
"""Seconds between samples. NVML itself averages over about as many."""


class Busy(FrozenModel):
    """Processor seconds a second, and the share of time in which the GPU had a kernel to run."""

    api_servers: tuple[float, ...]
    """Of each API server; its threads can make it more than 1."""
    engine: float
    """Of the server's other processes."""
    client: float
    """Of this process."""
    gpu: float | None
    """Between 0 and 1; None without a GPU."""


class _Sample(NamedTuple):
    """Processor seconds so far, and the GPU's utilization now."""

    time: float
    server: Mapping[int, float]
    """Of each of the server's processes, by process id."""
    client: float
    gpu: float | None


class BusyWatch:
    """Samples a server from its creation to :meth:`read`."""

    def __init__(self, server: Server) -> None:
        self._root = psutil.Process(server.process.pid)
        self._processes = [self._root, *self._root.children(recursive=True)]
        self._gpu = _open_gpu()
        self._samples = [self._take_sample()]
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def read(self, seconds: float) -> Busy:
        """Busy shares of the last so many seconds; ends the measurement."""
        end = self._take_sample()
        self._ended.set()
        self._sampler.join()
        earlier = [s for s in self._samples if s.time <= end.time - seconds]
        begin = earlier[-1] if earlier else self._samples[0]
        elapsed = end.time - begin.time
        shares = {
            process: (total - begin.server.get(process, 0.0)) / elapsed
            for process, total in end.server.items()
        }
        # A single API server is the first process; several are named children of it.
        titles = {process: self._find_title(process) for process in shares}
        servers = [p for p, title in titles.items() if "APIServer" in title]
        servers = servers or [self._root.pid]
        during = [s.gpu for s in self._samples if begin.time < s.time <= end.time]
        utilization = [share for share in during if share is not None]
        return Busy(
            api_servers=tuple(shares[process] for process in servers),
            engine=sum(s for process, s in shares.items() if process not in servers),
            client=(end.client - begin.client) / elapsed,
            gpu=mean(utilization) if utilization else None,
        )

    def _sample(self) -> None:
        while not self._ended.wait(_INTERVAL):
            self._samples.append(self._take_sample())

    def _take_sample(self) -> _Sample:
        server = {}
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                server[process.pid] = float(times.user + times.system)
        gpu = self._gpu() if self._gpu else None
        return _Sample(time.monotonic(), server, time.process_time(), gpu)

    @staticmethod
    def _find_title(process: int) -> str:
        """What vLLM calls a process, such as ``VLLM::APIServer_0``."""
        with contextlib.suppress(psutil.Error):
            return " ".join(psutil.Process(process).cmdline())
        return ""


def _open_gpu() -> Callable[[], float] | None:
    """A function that reads the first GPU's utilization by NVML; None without a GPU."""
    from vllm.third_party import pynvml

    try:
        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        pynvml.nvmlDeviceGetUtilizationRates(device)
    except pynvml.NVMLError:  # no driver, or none that tells
        return None
    return lambda: pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
