"""A few lines of HTTP that answer like a chat server: whole, or as a stream.

Knows nothing about models: it says what a function of the request says.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
Say = Callable[[Body], str]

PROMPT_TOKENS = 20
FIRST, LATER = 0.05, 0.02
"""Seconds before the first text of a stream, and before each one after it."""


@dataclass
class FakeServer:
    """Its address, and the bodies it got, in order."""

    url: str
    seen: list[Body] = field(default_factory=list)


def pruning(body: Body) -> dict[str, Any]:
    """What a request says about pruning."""
    return dict(body.get("mm_processor_kwargs", {}).get("autoprune", {}))


def question_of(body: Body) -> str:
    """The question of a request."""
    return str(body["messages"][0]["content"][1]["text"])


def image_of(body: Body) -> str:
    """The identity of the image of a request."""
    return str(body["messages"][0]["content"][0]["uuid"])


def _chunk(**parts: object) -> dict[str, object]:
    frame = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "fake"}
    return {**frame, "choices": [], **parts}


def _delta(**delta: str) -> dict[str, object]:
    return _chunk(choices=[{"index": 0, "delta": delta, "finish_reason": None}])


@contextlib.contextmanager
def fake_server(say: Say, status: int = 200) -> Iterator[FakeServer]:
    """Serve until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            running.seen.append(body)
            text = say(body)
            tokens = PROMPT_TOKENS + int(pruning(body).get("budget", 144))
            usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
            if status != 200:
                self._whole({"error": {"message": "no such budget", "code": status}})
            elif body.get("stream"):
                self._stream(text, usage)
            else:
                message = {"role": "assistant", "content": text}
                choice = {"index": 0, "finish_reason": "stop", "message": message}
                self._whole(
                    {**_chunk(object="chat.completion"), "choices": [choice], "usage": usage}
                )

        def _whole(self, answer: dict[str, object]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, text: str, usage: dict[str, int]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self._event(_delta(role="assistant", content=""))
            time.sleep(FIRST)
            for letter in text:
                self._event(_delta(content=letter))
                time.sleep(LATER)
            self._event(_chunk(usage=usage))
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

        def _event(self, chunk: dict[str, object]) -> None:
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            self.wfile.flush()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running = FakeServer(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield running
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
