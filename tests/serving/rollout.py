"""A rolling restart behind a small proxy, by the timings of a manifest, and clients that count.

For each replica: a new one starts, and gets requests once its probe is answered. The old one leaves
the proxy's endpoints while its ``preStop`` hook sleeps, then gets SIGTERM, and has to end before
the grace period does.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import httpx
import yaml  # type: ignore[import-untyped]

from tests.fake_server import serve_in_thread
from vllm_autoprune.http_client import CHAT

_SETTINGS: dict[str, Any] = {"trust_env": False, "verify": False, "timeout": 300.0}


@dataclass(frozen=True)
class Timings:
    """Seconds of a replica's end, as a manifest and its cluster have them."""

    pre_stop: float
    grace: float
    lag: float = 5.0
    """From the deletion of a pod until its proxy sends it nothing new; a cluster's, not ours."""

    @classmethod
    def read(cls, manifest: Path, *, scale: float = 1.0) -> Timings:
        """Those of a Deployment, each multiplied by ``scale``."""
        deployment, *_ = yaml.safe_load_all(manifest.read_text())
        pod = deployment["spec"]["template"]["spec"]
        hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert hook[0] == "sleep"
        grace = pod["terminationGracePeriodSeconds"]
        return cls(scale * float(hook[1]), scale * grace, scale * cls.lag)


class Replica(Protocol):
    """A server of a Deployment."""

    @property
    def url(self) -> str: ...

    def terminate(self) -> None:
        """Send SIGTERM."""

    def wait(self, timeout: float) -> None:
        """Wait until it has ended; raises where that takes longer than ``timeout`` seconds."""


class Proxy(ThreadingHTTPServer):
    """Sends requests to its endpoints in turn, each on a new connection; tries none again."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, endpoints: Sequence[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.endpoints = tuple(endpoints)
        self.turns = itertools.count()
        limits = httpx.Limits(max_keepalive_connections=0)
        self.client = httpx.Client(limits=limits, **_SETTINGS)


class _Forward(BaseHTTPRequestHandler):
    server: Proxy

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        endpoints = self.server.endpoints
        url = endpoints[next(self.server.turns) % len(endpoints)] + self.path
        headers = {"Content-Type": "application/json"}
        status = 502
        content = b"{}"
        with contextlib.suppress(httpx.HTTPError):
            answer = self.server.client.post(url, content=body, headers=headers)
            status = answer.status_code
            content = answer.content
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextlib.contextmanager
def proxy(endpoints: Sequence[str]) -> Iterator[Proxy]:
    """A proxy that answers until the block ends."""
    server = Proxy(endpoints)
    with server.client, serve_in_thread(server):
        yield server


@contextlib.contextmanager
def counting_clients(
    url: str, bodies: Sequence[dict[str, Any]]
) -> Iterator[Counter[str]]:
    """Clients that ask one request after another until the block ends, one for each body.

    Yields their outcomes once there are as many as clients: ``answered`` with as many tokens as
    asked for, or what came instead.
    """
    outcomes: Counter[str] = Counter()
    stop = threading.Event()

    def ask(body: dict[str, Any]) -> None:
        with httpx.Client(base_url=url, **_SETTINGS) as client:
            while not stop.is_set():
                answer = client.post(CHAT, json=body)
                outcome = f"status {answer.status_code}"
                if answer.status_code == 200:
                    tokens = answer.json()["usage"]["completion_tokens"]
                    is_complete = tokens == body["max_tokens"]
                    outcome = "answered" if is_complete else f"{tokens} tokens"
                outcomes[outcome] += 1  # by threads of one interpreter, so none is lost

    with ThreadPoolExecutor(len(bodies)) as pool:
        futures = [pool.submit(ask, body) for body in bodies]
        while outcomes.total() < len(bodies) and not any(f.done() for f in futures):
            time.sleep(0.05)
        try:
            yield outcomes
        finally:
            stop.set()
        for future in futures:
            future.result()


def roll(
    balancer: Proxy,
    replicas: Sequence[Replica],
    start: Callable[[], Replica],
    timings: Timings,
) -> None:
    """Replace replicas one after another, as ``maxSurge: 1, maxUnavailable: 0`` does.

    ``start`` returns a new replica once it is ready.
    """
    for old in replicas:
        balancer.endpoints = (*balancer.endpoints, start().url)
        begin = time.monotonic()
        remaining = tuple(url for url in balancer.endpoints if url != old.url)

        def leave(remaining: tuple[str, ...] = remaining) -> None:
            balancer.endpoints = remaining

        propagation = threading.Timer(timings.lag, leave)
        propagation.start()
        time.sleep(timings.pre_stop)
        old.terminate()
        old.wait(begin + timings.grace - time.monotonic())
        propagation.join()
