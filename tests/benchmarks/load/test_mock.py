"""The mock server leaves nothing behind, whenever it ends."""

from __future__ import annotations

import contextlib
import gc
import socket
import sys
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from benchmarks.load.mock import Script, mock_server


@contextlib.contextmanager
def clients(url: str, count: int) -> Iterator[None]:
    """Clients that connect, and send nothing, as fast as they can until the block ends."""
    ended = threading.Event()
    address = ("127.0.0.1", int(urlsplit(url).port or 0))

    def connect() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=1):
                pass

    threads = [threading.Thread(target=connect) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_no_socket_is_left_to_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers end while connections are being accepted: a matter of chance, so many of them do."""
    left: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: left.append(str(found.exc_value)))
    for _ in range(8):
        with contextlib.ExitStack() as stack, mock_server(Script(first=0.01)) as server:
            stack.enter_context(clients(server.url, 3))
    gc.collect()
    assert left == []
