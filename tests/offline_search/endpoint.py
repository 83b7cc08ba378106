"""Fake OpenAI-compatible endpoint over HTTP, whose responses the test defines."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
Answer = tuple[int, bytes, dict[str, str]]


def completion(text: str | None, **message: object) -> Answer:
    """Response with a chat completion of this text."""
    choice = {"index": 0, "finish_reason": "stop",
              "message": {"role": "assistant", "content": text, **message}}  # fmt: skip
    body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m",
            "choices": [choice],
            "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}}  # fmt: skip
    return 200, json.dumps(body).encode(), {}


def scored(prompt: list[dict[str, Any] | None]) -> Answer:
    """Response of a served model to a request for the log-probabilities of its prompt."""
    body = json.loads(completion(".")[1]) | {"prompt_logprobs": prompt}
    return 200, json.dumps(body).encode(), {}


def error(status: int, message: str = "no", **headers: str) -> Answer:
    """Error response in OpenAI's format."""
    body = {"error": {"message": message, "type": "x", "code": status}}
    return status, json.dumps(body).encode(), headers


def model_list(*names: str) -> Answer:
    """Response with a list of models."""
    data = [{"id": name} for name in names]
    return 200, json.dumps({"object": "list", "data": data}).encode(), {}


@dataclass
class FakeEndpoint:
    """A running fake endpoint: its answer function and the requests that it has received."""

    answer: Callable[[Body, int], Answer]
    requests: list[Body] = field(default_factory=list)
    url: str = ""
    models: Answer = field(default_factory=lambda: model_list("m"))
    paths: set[str] = field(default_factory=set)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # The default backlog of five would refuse clients that connect at the same time.
    request_queue_size = 128

    def __init__(self, fake: FakeEndpoint) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fake = fake

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore incomplete requests of killed clients; print any other error."""
        if not isinstance(sys.exception(), ConnectionError | json.JSONDecodeError):
            traceback.print_exc()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        fake = self.server.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake.requests.append(body)
        fake.paths.add(self.path)
        self._send(*fake.answer(body, len(fake.requests) - 1))

    def do_GET(self) -> None:
        self._send(*self.server.fake.models)

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        return None


@contextlib.contextmanager
def endpoint(answer: Callable[[Body, int], Answer]) -> Iterator[FakeEndpoint]:
    """Serve until the block ends; ``answer`` maps a request body and its number to a response."""
    fake = FakeEndpoint(answer)
    server = _Server(fake)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
