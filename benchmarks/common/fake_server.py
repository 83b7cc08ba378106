"""A fake OpenAI chat server without a model: replies and their timing are known beforehand.

Tests of clients run against it, and ``benchmarks.load check --mock`` proves the stop-watch on it:
what a client records must be what was emitted.

    python -m benchmarks.common.fake_server --port 8000 --first 0.2 --gaps 0.02,0.05,0.1
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MODEL = "mock"
PROMPT_TOKENS = 600
_READ_LIMIT = 1 << 20

Body = dict[str, Any]
"""A chat request, as JSON."""
Pages = Mapping[str, str | Callable[[], str] | None]
"""Answers to GET requests by path, or functions that write them; None: status 404."""


@dataclass(frozen=True)
class Reply:
    """How a chat request is answered: as a stream if it asks for one, else as a whole."""

    deltas: tuple[str, ...] | None = None
    """Texts, one a chunk; None: as many numbers as tokens are requested."""
    first: float = 0.1
    """Seconds from the request to the first text."""
    gaps: tuple[float, ...] = (0.02,)
    """Seconds between deltas, repeated as long as needed."""
    role_first: bool = True
    """Send the chunk that only names the role at once; else with the first text, as vLLM does."""
    usage: Mapping[str, object] | None = field(default_factory=dict)
    """Fields that differ from the default usage; None: no usage at all."""
    status: int = 200
    error: str = "the engine is gone"
    """Message of an answer whose status is not 200."""
    cut: bool = False
    """Close the connection in the middle of the stream, without [DONE]."""
    drop: bool = False
    """Close the connection without any answer."""

    def texts(self, body: Body) -> tuple[str, ...]:
        """The deltas of the answer to a request."""
        if self.deltas is not None:
            return self.deltas
        count = int(body.get("max_tokens") or body.get("max_completion_tokens") or 8)
        return tuple(f"{number} " for number in range(count))

    def times(self, count: int) -> list[float]:
        """Seconds from the request to each of ``count`` deltas."""
        times = [self.first]
        for number in range(count - 1):
            times.append(times[-1] + self.gaps[number % len(self.gaps)])
        return times


Respond = Callable[[Body], Reply]


@dataclass
class FakeServer:
    """A running server: its address, the requests it got in order, and when it answered."""

    url: str
    seen: list[Body] = field(default_factory=list)
    emitted: list[tuple[float, ...]] = field(default_factory=list)
    """``perf_counter`` just before each delta of a request was written."""


@dataclass
class _Handler:
    server: FakeServer
    respond: Respond
    model: str | None
    serves: int | None
    slots: asyncio.Semaphore | None
    gather: int
    pages: Pages
    refuse: Callable[[], None] = lambda: None
    """Accept no further connections."""
    _gathered: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            arrived, method, path, body = await _read_request(reader)
            if method == "GET":
                self._get(writer, path)
            else:
                await self._chat(writer, json.loads(body), arrived)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client closed the connection

    def _get(self, writer: asyncio.StreamWriter, path: str) -> None:
        page = self.pages.get(path)
        if page is None:
            _write_whole(writer, 404, b"not found")
        else:
            _write_whole(writer, 200, (page() if callable(page) else page).encode())

    async def _chat(self, writer: asyncio.StreamWriter, body: Body, arrived: float) -> None:
        self.server.seen.append(body)
        seen = len(self.server.seen)
        if seen >= self.gather:
            self._gathered.set()
        await self._gathered.wait()
        if self.serves is not None and seen > self.serves:
            self.refuse()
            writer.transport.abort()
        elif self.model is not None and body.get("model") != self.model:
            _write_whole(writer, 404, _error(f"The model `{body.get('model')}` does not exist."))
        elif self.slots is not None:
            async with self.slots:
                await self._reply(writer, body, time.perf_counter())
        else:
            await self._reply(writer, body, arrived)

    async def _reply(self, writer: asyncio.StreamWriter, body: Body, begin: float) -> None:
        reply = self.respond(body)
        if reply.drop:
            writer.transport.abort()
        elif reply.status != 200:
            _write_whole(writer, reply.status, _error(reply.error))
        elif body.get("stream"):
            await self._stream(writer, reply, body, begin)
        else:
            message = {"role": "assistant", "content": "".join(reply.texts(body))}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            answer = {**_chunk([choice]), "object": "chat.completion", "usage": _usage(reply, body)}
            _write_whole(writer, 200, json.dumps(answer).encode())

    async def _stream(
        self, writer: asyncio.StreamWriter, reply: Reply, body: Body, begin: float
    ) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        )
        texts = reply.texts(body)
        if reply.role_first:
            _write_event(writer, _chunk([_delta(role="assistant", content="")]))
        emitted = []
        for number, (text, at) in enumerate(zip(texts, reply.times(len(texts)), strict=False)):
            await asyncio.sleep(max(begin + at - time.perf_counter(), 0))
            if number == 0 and not reply.role_first:
                _write_event(writer, _chunk([_delta(role="assistant", content="")]))
            emitted.append(time.perf_counter())
            _write_event(writer, _chunk([_delta(content=text)]))
            if reply.cut and number >= len(texts) // 2:
                writer.transport.abort()
                return
        self.server.emitted.append(tuple(emitted))
        if reply.usage is not None:
            _write_event(writer, {**_chunk([]), "usage": _usage(reply, body)})
        writer.write(_framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def _read_request(reader: asyncio.StreamReader) -> tuple[float, str, str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    arrived = time.perf_counter()
    method, path, _ = head.split(" ", 2)
    lengths = [
        int(line.partition(":")[2])
        for line in head.split("\r\n")
        if line.lower().startswith("content-length")
    ]
    return arrived, method, path, await reader.readexactly(lengths[0] if lengths else 0)


def _usage(reply: Reply, body: Body) -> dict[str, object]:
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": len(reply.texts(body))}
    return {**usage, "total_tokens": sum(usage.values()), **(reply.usage or {})}


def _error(message: str) -> bytes:
    return json.dumps({"error": {"message": message}}).encode()


def _write_whole(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    head = f"HTTP/1.1 {status} Fake\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)


def _delta(**delta: str) -> dict[str, object]:
    return {"index": 0, "delta": delta, "finish_reason": None}


def _chunk(choices: list[dict[str, object]]) -> dict[str, object]:
    frame = {"id": "fake", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
    return {**frame, "choices": choices}


def _write_event(writer: asyncio.StreamWriter, chunk: Mapping[str, object]) -> None:
    writer.write(_framed(b"data: " + json.dumps(chunk).encode() + b"\n\n"))


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@contextlib.contextmanager
def fake_server(
    respond: Reply | Respond | None = None,
    *,
    model: str | None = MODEL,
    pages: Pages | None = None,
    serves: int | None = None,
    slots: int | None = None,
    gather: int = 0,
    port: int = 0,
) -> Iterator[FakeServer]:
    """Serve from a thread until the block ends.

    ``model``: the only one that is served; None: any. ``pages``: added to ``/v1/models``,
    ``/version`` and ``/metrics``. ``serves``: after so many requests connections are cut and new
    ones refused. ``slots``: requests worked on at once; the others wait, so that rates saturate.
    ``gather``: no request is answered before so many have arrived.
    """
    reply = respond or Reply()
    models = json.dumps({"object": "list", "data": [{"id": model or MODEL, "object": "model"}]})
    standard: Pages = {
        "/health": "",
        "/v1/models": models,
        "/version": '{"version": "mock"}',
        "/metrics": "vllm:kv_cache_usage_perc 0.25\n",
    }
    server = FakeServer("")

    def handler() -> _Handler:
        return _Handler(
            server=server,
            respond=(lambda body: reply) if isinstance(reply, Reply) else reply,
            model=model,
            serves=serves,
            slots=asyncio.Semaphore(slots) if slots else None,
            gather=gather,
            pages={**standard, **(pages or {})},
        )

    ready, loop = threading.Event(), asyncio.new_event_loop()
    task = loop.create_task(_serve(handler, port, ready))
    thread = threading.Thread(target=_run, args=(loop, task))
    thread.start()
    try:
        if not ready.wait(10):
            raise RuntimeError(f"the fake server could not listen on port {port}")
        yield server
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


class _Connections:
    """Accepts connections and answers each in a task; :meth:`close` closes every socket.

    ``asyncio.start_server`` loses an accepted connection if the server closes before that has its
    transport; its socket is then closed by the garbage collector only.
    """

    def __init__(
        self, handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
    ) -> None:
        self._handle = handle
        self._listener: socket.socket | None = None
        self._open: dict[asyncio.Task[None], socket.socket] = {}

    def listen(self, port: int) -> int:
        """Accept connections on a local port, which is returned; 0: any free one."""
        self._listener = socket.create_server(("127.0.0.1", port), backlog=128)
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)
        return int(self._listener.getsockname()[1])

    def refuse(self) -> None:
        """Accept no further connections."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    async def close(self) -> None:
        """Accept no further connections, and cut the open ones."""
        self.refuse()
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close their sockets in the next turn of the loop

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        connection.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._serve(connection))
        self._open[task] = connection
        task.add_done_callback(lambda task: self._open.pop(task).close())

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=_READ_LIMIT)
        try:
            await self._handle(reader, writer)
            writer.close()
            await writer.wait_closed()
        except OSError:
            pass  # the client closed the connection
        finally:
            writer.transport.abort()


async def _serve(make: Callable[[], _Handler], port: int, ready: threading.Event) -> None:
    handler = make()
    connections = _Connections(handler.handle)
    handler.refuse = connections.refuse
    handler.server.url = f"http://127.0.0.1:{connections.listen(port)}"
    ready.set()
    try:
        await asyncio.Event().wait()
    finally:
        await connections.close()


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    with contextlib.closing(loop), contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(task)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.common.fake_server", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--first", type=float, default=0.1, help="seconds to the first text")
    parser.add_argument("--gaps", default="0.02", help="seconds between deltas, repeated")
    parser.add_argument("--slots", type=int, help="requests worked on at once (default: all)")
    parser.add_argument("--model", default=MODEL, help="name of the model")
    options = parser.parse_args(arguments)
    reply = Reply(first=options.first, gaps=tuple(float(gap) for gap in options.gaps.split(",")))
    with fake_server(reply, model=options.model, slots=options.slots, port=options.port) as server:
        print(f"fake server: {server.url}, model {options.model}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
