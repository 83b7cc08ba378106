"""A router of TCP connections in front of several servers, as a Kubernetes Service is."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from urllib.parse import urlsplit

Address = tuple[str, int]


class TcpRouter:
    """Gives new connections to the servers in turn; connections that are open stay where they are.

    Runs in a thread of its own, between ``with`` and the end of its block.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._targets = _addresses(urls)
        self._turn = 0
        self._opened: Counter[Address] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.url = ""

    def send_to(self, urls: Sequence[str]) -> None:
        """From now on, new connections go to these servers alone."""
        self._targets = _addresses(urls)

    def opened(self, url: str) -> int:
        """Connections that a server was given so far."""
        return self._opened[_addresses([url])[0]]

    def __enter__(self) -> TcpRouter:
        self._thread.start()
        starting = asyncio.start_server(self._forward, "127.0.0.1", 0)
        server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        self._server = server
        host, port = server.sockets[0].getsockname()[:2]
        self.url = f"http://{host}:{port}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = self._targets[self._turn % len(self._targets)]
        self._turn += 1
        self._opened[target] += 1
        upstream_reader, upstream_writer = await asyncio.open_connection(*target)
        await asyncio.gather(
            _copy(reader, upstream_writer), _copy(upstream_reader, writer), return_exceptions=True
        )
        upstream_writer.close()
        writer.close()


def _addresses(urls: Sequence[str]) -> list[Address]:
    parts = [urlsplit(url) for url in urls]
    return [(part.hostname or "", part.port or 80) for part in parts]


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
