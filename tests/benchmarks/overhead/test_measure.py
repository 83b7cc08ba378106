"""Stamps at the client, against a server that answers on a known schedule."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.overhead.measure import RequestFailed, metric, stages, timed, together

CROWD = 8
METRICS = """# HELP vllm:request_queue_time_seconds x
vllm:request_queue_time_seconds_sum{engine="0",model_name="a b"} 1.5
vllm:request_queue_time_seconds_count{engine="0"} 3.0
vllm:request_prefill_time_seconds_sum{engine="0"} 0.25
vllm:request_prefill_time_seconds_sum{engine="1"} 0.5
"""


class Scripted(BaseHTTPRequestHandler):
    """Names the role at once, says a word after WAIT, another after as much again, then usage."""

    WAIT = 0.05
    arrived = threading.Barrier(CROWD, timeout=60)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked.get("wrong"):
            self.send_error(400, "wrong")
            return
        if asked.get("crowd"):
            self.arrived.wait()
        self.send_response(200)
        self.end_headers()
        self._chunk({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for word in ("one", "two"):
            time.sleep(self.WAIT)
            said = "" if asked.get("silent") else word
            self._chunk({"choices": [{"delta": {"content": said}}]})
        details = {"cached_tokens": 4}
        usage = {"prompt_tokens": 93, "prompt_tokens_details": details}
        self._chunk({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _chunk(self, content: object) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_first_text_is_stamped_and_not_the_role(url: str) -> None:
    stamps = timed(url, b"{}")

    # Lower bounds alone: a busy machine may make everything late, nothing early.
    assert Scripted.WAIT <= stamps.ttft < stamps.total
    assert stamps.total >= 2 * Scripted.WAIT
    assert (stamps.prompt_tokens, stamps.cached_tokens) == (93, 4)


def test_requests_sent_together_run_together(url: str) -> None:
    # Each answer waits until all requests have come; one at a time none would ever be answered.
    found = together(url, [b'{"crowd": 1}'] * CROWD)

    assert len(found) == CROWD


def test_a_refused_request_fails(url: str) -> None:
    with pytest.raises(RequestFailed, match="400"):
        timed(url, b'{"wrong": 1}')


def test_an_answer_without_text_fails(url: str) -> None:
    with pytest.raises(RequestFailed, match="no text"):
        timed(url, b'{"silent": 1}')


def test_a_metric_is_summed_over_its_labels() -> None:
    assert metric(METRICS, "vllm:request_prefill_time_seconds_sum") == 0.75
    assert stages(METRICS) == {"queue": 1.5, "prefill": 0.75}
