"""Killed worker under load: a pruned server behaves like stock vLLM."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from benchmarks.server import Server
from tests.serving.engine import examples
from tests.serving.http import body

pytestmark = [pytest.mark.engine, pytest.mark.timeout(590), pytest.mark.ends_servers]

PATIENCE = 120.0
SETTLED = 3.0
"""Seconds in which answers that a worker has already made are delivered."""


@dataclass(frozen=True)
class Aftermath:
    """Statuses of the requests that ran (0: no answer), and the server's exit."""

    statuses: frozenset[int]
    ended: bool


def kill_worker(server: Server) -> Aftermath:
    worker = _worker(server)
    with ThreadPoolExecutor(4) as pool:
        deadline = time.monotonic() + PATIENCE
        requests: list[Future[int]] = []
        while not requests:
            assert time.monotonic() < deadline, "every request is answered before the kill"
            requests = _interrupt(server, worker, pool)
        worker.kill()
        statuses = frozenset(future.result() for future in requests)
        deadline = time.monotonic() + PATIENCE
        while server.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        return Aftermath(statuses, server.process.poll() is not None)


def _interrupt(
    server: Server, worker: psutil.Process, pool: ThreadPoolExecutor
) -> list[Future[int]]:
    """Send requests and stop the worker while some of them run; those that it has not answered.

    On a busy machine it may have answered some, or all, before it is stopped.
    """
    requests = [pool.submit(_status, server, i) for i in range(4)]
    while not all(request.done() for request in requests):
        if "vllm:num_requests_running" in _running(server):
            worker.suspend()
            time.sleep(SETTLED)
            break
        time.sleep(0.05)
    unanswered = [request for request in requests if not request.done()]
    if not unanswered:
        worker.resume()
    return unanswered


def _status(server: Server, number: int) -> int:
    long = {"max_tokens": 1800, "ignore_eos": True}
    try:
        return server.post("/v1/chat/completions", body(server, examples(2)[number], **long))[0]
    except httpx.HTTPError:
        return 0


def _running(server: Server) -> str:
    """Lines of ``/metrics`` that show running requests."""
    lines = server.get("/metrics").splitlines()
    return "\n".join(
        line
        for line in lines
        if line.startswith("vllm:num_requests_running{") and float(line.rsplit(" ", 1)[1]) > 0
    )


def _worker(server: Server) -> psutil.Process:
    children = psutil.Process(server.process.pid).children(recursive=True)
    titles = {child: " ".join(child.cmdline()) for child in children}
    for title in ("VLLM::Worker", "VLLM::EngineCore"):
        for child, command in titles.items():
            if command.startswith(title):
                return child
    raise AssertionError(f"no worker among {list(titles.values())}")


def test_pruned_server_ends_like_stock_after_a_killed_worker(stock: Server, pruned: Server) -> None:
    """The last test of these servers (``conftest.pytest_collection_modifyitems``)."""
    aftermath = kill_worker(stock)
    assert kill_worker(pruned) == aftermath
    assert 200 not in aftermath.statuses
