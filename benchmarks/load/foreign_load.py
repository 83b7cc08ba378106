"""Load of other programs on the client's machine during a run: CPU time that is not the test's.

The machine's CPU time less that of the load clients and of the server under test, which is found by
the port that it listens on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]

from benchmarks.common import StrictModel

LOCUSTFILE = "locustfile.py"
PROXIES = ("docker-proxy", "rootlessport", "slirp4netns", "pasta")
"""Programs that listen in place of a server in a container, whose processes are then not known."""

ProcessTimes = dict[int, float]
"""CPU seconds of processes and of their ended children, by process id."""


class ForeignLoad(StrictModel):
    """CPU time of other programs during a run."""

    share: float
    """Of the CPU time of all cores that the client may use."""
    cores: int
    server_here: bool
    """Whether the server runs on this machine."""
    server_known: bool
    """Whether its processes are known; if not, and it runs here, they count as others."""


class ForeignLoadWatch:
    """Measures the load of other programs between :meth:`start` and :meth:`stop`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._server_here = is_own_address(parts.hostname or "")
        self._cores = list_cores()
        self._before: tuple[float, float, ProcessTimes] | None = None

    def start(self) -> None:
        """Read all times for the first time."""
        self._before = self._read()

    def stop(self) -> ForeignLoad | None:
        """The load since the start; None where it was not started or the machine has no clocks."""
        if self._before is None:
            return None
        (busy, total, own), now = self._before, self._read()
        elapsed = now[1] - total
        if elapsed <= 0:
            return None
        # A process that has ended is in the times of its parent.
        known = sum(now[2].values()) - sum(own.values())
        share = max(now[0] - busy - known, 0.0) / elapsed
        return ForeignLoad(
            share=round(share, 4),
            cores=len(self._cores),
            server_here=self._server_here,
            server_known=bool(self._server_processes()),
        )

    def _read(self) -> tuple[float, float, ProcessTimes]:
        """Busy and total seconds of the cores, and the seconds of the test's processes."""
        own = {process.pid: process for process in self._list_own_processes()}
        times = {pid: seconds for pid, process in own.items() if (seconds := _seconds(process))}
        busy, total = read_core_times(self._cores)
        return busy, total, times

    def _list_own_processes(self) -> Iterator[psutil.Process]:
        yield from _with_children([psutil.Process()])
        yield from _with_children(self._server_processes())
        for process in psutil.process_iter():
            if any(Path(part).name == LOCUSTFILE for part in _command(process)):
                yield process

    def _server_processes(self) -> list[psutil.Process]:
        if not self._server_here:
            return []
        processes = [_find_launcher(process) for process in find_listeners(self._port)]
        return [] if any(_name(process) in PROXIES for process in processes) else processes


def list_cores() -> list[int]:
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def read_core_times(cores: Iterable[int]) -> tuple[float, float]:
    """Busy and total CPU seconds of some cores since the machine was started."""
    every = psutil.cpu_times(percpu=True)
    busy = total = 0.0
    for core in cores:
        if core < len(every):
            fields = every[core]._asdict()
            # Guests are part of user and nice already.
            guests = fields.get("guest", 0.0) + fields.get("guest_nice", 0.0)
            whole = sum(fields.values()) - guests
            total += whole
            busy += whole - fields.get("idle", 0.0) - fields.get("iowait", 0.0)
    return busy, total


def find_listeners(port: int) -> list[psutil.Process]:
    """Processes that listen on a TCP port, as far as this user may see them."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return []
    pids = {
        connection.pid
        for connection in connections
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    processes = []
    for pid in sorted(pid for pid in pids if pid):
        try:
            processes.append(psutil.Process(pid))
        except psutil.Error:
            continue
    return processes


def is_own_address(host: str) -> bool:
    """Whether a host name stands for this machine."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {each.address for group in psutil.net_if_addrs().values() for each in group}
    return any(
        address in own or address.startswith("127.") or address in ("::1", "0.0.0.0")
        for address in addresses
    )


def _find_launcher(process: psutil.Process) -> psutil.Process:
    """The first process of a vLLM server: with several API servers, it started the one found."""
    try:
        while (parent := process.parent()) and _is_vllm(parent):
            process = parent
    except psutil.Error:
        pass
    return process


def _is_vllm(process: psutil.Process) -> bool:
    return any(
        Path(part).name == "vllm" or part.startswith("vllm.entrypoints")
        for part in _command(process)
    )


def _with_children(processes: Iterable[psutil.Process]) -> Iterator[psutil.Process]:
    for process in processes:
        try:
            yield from (process, *process.children(recursive=True))
        except psutil.Error:
            continue


def _seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return ""
