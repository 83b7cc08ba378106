"""Stamps at the client: one streamed request, or several sent at the same moment.

Knows nothing about what is asked, nor about statistics.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

PATH = "/v1/chat/completions"
PATIENCE = 300.0


class RequestFailed(RuntimeError):
    """A request that was not answered as it should have been."""


@dataclass(frozen=True, slots=True)
class Stamps:
    """Seconds from sending to the first text and to the end, and what usage says."""

    ttft: float
    total: float
    prompt_tokens: int
    cached_tokens: int


def timed(url: str, body: bytes, start: threading.Barrier | None = None) -> Stamps:
    """One streamed request on a connection of its own, which is open before the clock starts."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
    try:
        connection.connect()
        if start is not None:
            start.wait(timeout=PATIENCE)
        sent = time.perf_counter()
        connection.request("POST", PATH, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RequestFailed(f"status {answer.status}: {answer.read()[:400].decode()}")
        first, usage = None, None
        while line := answer.readline():
            if not line.startswith(b"data: {"):
                continue
            arrived, chunk = time.perf_counter(), json.loads(line[6:])
            if "error" in chunk:
                raise RequestFailed(str(chunk["error"]))
            usage = chunk.get("usage") or usage
            # The first chunk only names the role.
            if first is None and any(c["delta"].get("content") for c in chunk["choices"]):
                first = arrived
        done = time.perf_counter()
    finally:
        connection.close()
    if first is None or usage is None:
        raise RequestFailed("the answer held no text or no usage")
    details = usage.get("prompt_tokens_details") or {}
    cached = int(details.get("cached_tokens") or 0)
    return Stamps(first - sent, done - sent, int(usage["prompt_tokens"]), cached)


def together(url: str, bodies: Sequence[bytes]) -> list[Stamps]:
    """All requests at the same moment, each on a thread of its own."""
    if len(bodies) == 1:
        return [timed(url, bodies[0])]
    barrier = threading.Barrier(len(bodies))
    with ThreadPoolExecutor(len(bodies)) as pool:
        running = [pool.submit(timed, url, body, barrier) for body in bodies]
        return [future.result() for future in running]


def metric(exposition: str, name: str) -> float:
    """Sum of one metric over its labels in a server's ``/metrics``."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", exposition, re.MULTILINE)
    return sum(map(float, found))


STAGES: Mapping[str, str] = {
    "queue": "vllm:request_queue_time_seconds_sum",
    "prefill": "vllm:request_prefill_time_seconds_sum",
}
"""What the engine itself says about a request, summed over all requests so far."""


def stages(exposition: str) -> dict[str, float]:
    """Seconds that requests have spent in the engine so far, by stage."""
    return {stage: metric(exposition, name) for stage, name in STAGES.items()}
