"""A chat server without a model: it emits deltas on a schedule that is known beforehand.

Knows nothing about load tests. It proves the stop-watch: what is recorded must be what was emitted.

    python -m benchmarks.load.mock --port 8000 --first 0.2 --gaps 0.02,0.05,0.1
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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

MODEL = "mock"
PROMPT_TOKENS = 600
READ = 1 << 20


@dataclass(frozen=True)
class Script:
    """How every request is answered."""

    first: float = 0.1
    """Seconds from the request to the first text."""
    gaps: tuple[float, ...] = (0.02,)
    """Seconds between deltas, over and over."""
    role_first: bool = True
    """The chunk that only names the role goes out at once, long before the first text."""
    usage: bool = True
    status: int = 200
    serves: int | None = None
    """After so many requests the server drops dead: connections are cut, new ones refused."""
    cut: bool = False
    """Streams end in the middle, without [DONE]."""
    model: str = MODEL
    slots: int | None = None
    """At most so many requests are worked on at once; the others wait, so that rates saturate."""


@dataclass
class MockServer:
    """A running mock."""

    url: str
    seen: list[dict[str, object]] = field(default_factory=list)
    emitted: list[tuple[float, ...]] = field(default_factory=list)
    """``perf_counter`` just before each delta of a request was written."""


def due(script: Script, count: int) -> list[float]:
    """Seconds from the request to each of ``count`` deltas."""
    times = [script.first]
    for number in range(count - 1):
        times.append(times[-1] + script.gaps[number % len(script.gaps)])
    return times


class _Mock:
    def __init__(self, script: Script, server: MockServer) -> None:
        self.script, self.server = script, server
        self.slots = asyncio.Semaphore(script.slots or 1 << 20)
        self.connections = _Connections(self.answer)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            arrived, method, path, body = await _request(reader)
            if method == "GET":
                _whole(writer, 200, _about(path, self.script.model))
            else:
                await self._chat(writer, body, arrived)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away

    async def _chat(self, writer: asyncio.StreamWriter, raw: bytes, arrived: float) -> None:
        script, body = self.script, json.loads(raw)
        self.server.seen.append(body)
        if script.serves is not None and len(self.server.seen) > script.serves:
            self.connections.refuse()
            writer.transport.abort()
            return
        if body.get("model") != script.model:
            _whole(writer, 404, _error(f"The model `{body.get('model')}` does not exist."))
        elif script.status != 200:
            _whole(writer, script.status, _error("the engine is gone"))
        else:
            async with self.slots:
                if script.slots is not None:
                    arrived = time.perf_counter()
                await self._stream(writer, body, arrived)

    async def _stream(
        self, writer: asyncio.StreamWriter, body: dict[str, object], arrived: float
    ) -> None:
        script, count = (
            self.script,
            int(str(body.get("max_tokens", body.get("max_completion_tokens", 8)))),
        )
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        )
        if script.role_first:
            _event(writer, _chunk([_delta(role="assistant", content="")]))
        emitted = []
        for number, at in enumerate(due(script, count)):
            await asyncio.sleep(max(arrived + at - time.perf_counter(), 0))
            if number == 0 and not script.role_first:
                _event(writer, _chunk([_delta(role="assistant", content="")]))
            emitted.append(time.perf_counter())
            _event(writer, _chunk([_delta(content=f"{number} ")]))
            if script.cut and number >= count // 2:
                writer.transport.abort()
                return
        self.server.emitted.append(tuple(emitted))
        if script.usage:
            tokens = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": count}
            _event(writer, _chunk([], usage={**tokens, "total_tokens": PROMPT_TOKENS + count}))
        writer.write(_framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def _request(reader: asyncio.StreamReader) -> tuple[float, str, str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    arrived = time.perf_counter()
    method, path, _ = head.split(" ", 2)
    length = next(
        (
            int(line.split(":")[1])
            for line in head.split("\r\n")
            if line.lower().startswith("content-length")
        ),
        0,
    )
    return arrived, method, path, await reader.readexactly(length)


def _about(path: str, model: str) -> bytes:
    if path.endswith("/models"):
        return json.dumps({"object": "list", "data": [{"id": model, "object": "model"}]}).encode()
    if path.endswith("/version"):
        return b'{"version": "mock"}'
    return b"vllm:kv_cache_usage_perc 0.25\n" if path.endswith("/metrics") else b"{}"


def _error(message: str) -> bytes:
    return json.dumps({"error": {"message": message}}).encode()


def _whole(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    head = f"HTTP/1.1 {status} Mock\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)


def _delta(**delta: str) -> dict[str, object]:
    return {"index": 0, "delta": delta, "finish_reason": None}


def _chunk(choices: list[dict[str, object]], **more: object) -> dict[str, object]:
    frame = {"id": "mock", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
    return {**frame, "choices": choices, **more}


def _event(writer: asyncio.StreamWriter, chunk: dict[str, object]) -> None:
    writer.write(_framed(b"data: " + json.dumps(chunk).encode() + b"\n\n"))


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class _Connections:
    """Accepts connections and answers each in a task; :meth:`close` closes every socket.

    ``asyncio.start_server`` loses a connection that it has accepted when the server closes before
    the connection has its transport: nobody closes the socket then but the garbage collector.
    """

    def __init__(
        self, answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
    ) -> None:
        self._answer = answer
        self._listener: socket.socket | None = None
        self._open: dict[asyncio.Task[None], socket.socket] = {}

    def listen(self, port: int) -> int:
        """Accept from now on, on a port of this machine; returns the port."""
        self._listener = socket.create_server(("127.0.0.1", port), backlog=128)
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)
        return int(self._listener.getsockname()[1])

    def refuse(self) -> None:
        """Accept no more."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    async def close(self) -> None:
        """Accept no more, and cut every connection."""
        self.refuse()
        left = dict(self._open)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await asyncio.sleep(0)  # transports close their sockets in the loop's next turn

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        connection.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._serve(connection))
        self._open[task] = connection
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._open.pop(task).close()

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=READ)
        try:
            await self._answer(reader, writer)
            writer.close()
            await writer.wait_closed()
        except OSError:
            pass  # the client went away
        finally:
            writer.transport.abort()


async def _serve(script: Script, server: MockServer, port: int, ready: threading.Event) -> None:
    mock = _Mock(script, server)
    server.url = f"http://127.0.0.1:{mock.connections.listen(port)}"
    ready.set()
    try:
        await asyncio.Event().wait()
    finally:
        await mock.connections.close()


@contextlib.contextmanager
def mock_server(script: Script | None = None, port: int = 0) -> Iterator[MockServer]:
    """Serve from a thread until the block ends."""
    server, ready, loop = MockServer(""), threading.Event(), asyncio.new_event_loop()
    task = loop.create_task(_serve(script or Script(), server, port, ready))
    thread = threading.Thread(target=_run, args=(loop, task))
    thread.start()
    try:
        if not ready.wait(10):
            raise RuntimeError(f"the mock server could not listen on port {port}")
        yield server
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    with contextlib.closing(loop), contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(task)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.load.mock", description=__doc__)
    made.add_argument("--port", type=int, default=8000)
    made.add_argument("--first", type=float, default=0.1, help="seconds to the first text")
    made.add_argument("--gaps", default="0.02", help="seconds between deltas, over and over")
    made.add_argument("--slots", type=int, help="requests worked on at once")
    made.add_argument("--model", default=MODEL)
    chosen = made.parse_args(arguments)
    gaps = tuple(float(gap) for gap in chosen.gaps.split(","))
    script = Script(first=chosen.first, gaps=gaps, slots=chosen.slots, model=chosen.model)
    with mock_server(script, chosen.port) as server:
        print(f"mock server: {server.url}, model {chosen.model}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
