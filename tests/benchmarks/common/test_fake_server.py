"""The fake server closes every socket when it ends, also of connections just accepted."""

from __future__ import annotations

import contextlib
import gc
import socket
import sys
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from benchmarks.common.fake_server import Reply, fake_server


@contextlib.contextmanager
def clients(url: str, count: int) -> Iterator[None]:
    """Clients that connect as fast as they can, and send nothing, until the block ends."""
    stop = threading.Event()
    address = ("127.0.0.1", int(urlsplit(url).port or 0))

    def connect() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=1):
                pass

    threads = [threading.Thread(target=connect) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_every_socket_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight servers end while they accept connections, because the race is rare."""
    unclosed: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: unclosed.append(str(event.exc_value)))
    for _ in range(8):
        with contextlib.ExitStack() as stack, fake_server(Reply(ttft=0.01)) as server:
            stack.enter_context(clients(server.url, 3))
    gc.collect()
    assert unclosed == []
