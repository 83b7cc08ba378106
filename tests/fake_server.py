"""A fake OpenAI chat server without a model: replies and their timing are known beforehand.

Tests of clients run against it: what a client records must be what was emitted.
"""

from __future__ import annotations

import contextlib
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler
from typing import Any

MODEL = "mock"

Body = dict[str, Any]
"""A chat request, as JSON."""
Answer = tuple[int, bytes, dict[str, str]]
"""Status, body and headers of an answer that is written as it is."""
_Pages = Mapping[str, str | Answer | Callable[[], str | Answer] | None]
"""Answers to GET requests by path, or functions that write them; None: status 404."""


@dataclass(frozen=True)
class Reply:
    """How a chat request is answered: as a stream if it asks for one, else as a whole."""

    deltas: tuple[str, ...] | None = None
    """Texts, one a chunk; None: as many numbers as tokens are requested."""
    thoughts: int = 0
    """How many of them come first as thoughts."""
    ttft: float = 0.1
    """Seconds from the request to the first text."""
    gaps: tuple[float, ...] = (0.02,)
    """Seconds between deltas, repeated as long as needed."""
    usage: Mapping[str, object] | None = field(default_factory=dict)
    """Fields that differ from the default usage; None: no usage at all."""
    status: int = 200
    error: str = "the engine is gone"
    """Message of an answer whose status is not 200."""
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
        times = [self.ttft]
        for number in range(count - 1):
            times.append(times[-1] + self.gaps[number % len(self.gaps)])
        return times

    def count_tokens(self, body: Body) -> dict[str, object]:
        """The usage of the answer to a request."""
        usage = {"prompt_tokens": 600, "completion_tokens": len(self.texts(body))}
        return {**usage, "total_tokens": sum(usage.values()), **(self.usage or {})}


_Respond = Callable[[Body], Reply | Answer]


class FakeServer(socketserver.ThreadingTCPServer):
    """A running server with a thread for each connection.

    ``url``: its address; ``requests``: the bodies it got, in order; ``headers``: of all requests.
    """

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self, port: int, respond: _Respond, model: str | None, pages: _Pages
    ) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.respond = respond
        self.model = model
        self.pages = dict(pages)
        self.requests = list[Body]()
        self.headers = list[Message]()
        self.stop = threading.Event()

    def server_close(self) -> None:
        """End the answers that are being written, and wait for their threads."""
        self.stop.set()
        super().server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 5.0  # seconds without a byte; the end of the server waits for all its connections
    server: FakeServer

    def handle(self) -> None:
        # The client closed the connection, or was killed while it wrote a request.
        with contextlib.suppress(ConnectionError, json.JSONDecodeError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        self.server.headers.append(self.headers)
        page = self.server.pages.get(self.path)
        page = page() if callable(page) else page
        if page is None:
            page = (404, b"not found", {})
        elif isinstance(page, str):
            page = (200, page.encode(), {})
        self._write(*page)

    def do_POST(self) -> None:
        begin = time.perf_counter()
        server = self.server
        self.close_connection = True
        body: Body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.requests.append(body)
        server.headers.append(self.headers)
        if server.model in (None, body.get("model")):
            reply = server.respond(body)
        else:
            reply = Reply(
                status=404, error=f"The model `{body.get('model')}` does not exist."
            )
        if isinstance(reply, tuple):
            self._write(*reply)
        elif reply.drop:
            return
        elif reply.status != 200:
            self._write(
                reply.status, json.dumps({"error": {"message": reply.error}}).encode()
            )
        elif body.get("stream"):
            self._stream(reply, body, begin)
        else:
            message = {"role": "assistant", "content": "".join(reply.texts(body))}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            answer = {"object": "chat.completion", "usage": reply.count_tokens(body)}
            self._write(200, json.dumps({**_chunk(choice), **answer}).encode())

    def _stream(self, reply: Reply, body: Body, begin: float) -> None:
        def write(event: Mapping[str, object] | str) -> None:
            text = event if isinstance(event, str) else json.dumps(event)
            data = f"data: {text}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

        def write_delta(**delta: str) -> None:
            write(_chunk({"index": 0, "delta": delta, "finish_reason": None}))

        self._begin(
            200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}
        )
        texts = reply.texts(body)
        write_delta(role="assistant", content="")
        for number, (text, at) in enumerate(
            zip(texts, reply.times(len(texts)), strict=True)
        ):
            if self.server.stop.wait(max(begin + at - time.perf_counter(), 0)):
                return
            write_delta(**{"reasoning" if number < reply.thoughts else "content": text})
        if reply.usage is not None:
            write({**_chunk(), "usage": reply.count_tokens(body)})
        write("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _write(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        framing = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        self._begin(status, {**framing, **(headers or {})})
        self.wfile.write(body)

    def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Connection": "close", **headers}.items():
            self.send_header(name, value)
        self.end_headers()


def _chunk(*choices: Mapping[str, object]) -> dict[str, object]:
    frame = {
        "id": "fake",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": MODEL,
    }
    return {**frame, "choices": choices}


@contextlib.contextmanager
def serve_in_thread(server: socketserver.BaseServer) -> Iterator[None]:
    """Let a server answer until the block ends, and close it then."""
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def fake_server(
    respond: Reply | _Respond | None = None,
    *,
    model: str | None = MODEL,
    pages: _Pages | None = None,
    port: int = 0,
) -> Iterator[FakeServer]:
    """Serve from threads until the block ends.

    ``model``: the only one that is served; None: any. ``pages``: added to ``/v1/models``,
    ``/version`` and ``/metrics``.
    """
    reply = respond or Reply()
    models = json.dumps(
        {"object": "list", "data": [{"id": model or MODEL, "object": "model"}]}
    )
    standard: _Pages = {
        "/health": "",
        "/v1/models": models,
        "/version": '{"version": "mock"}',
        "/metrics": "vllm:kv_cache_usage_perc 0.25\n",
    }
    answer = (lambda body: reply) if isinstance(reply, Reply) else reply
    server = FakeServer(port, answer, model, {**standard, **(pages or {})})
    with serve_in_thread(server):
        yield server
