"""What servers say they are, and those that say nothing."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from benchmarks.load.told import about
from benchmarks.server import free_port

ANSWERS = {
    "/version": json.dumps({"version": "0.32.0"}),
    "/v1/autoprune": json.dumps(
        {"state": "autoprune", "digest": "abc", "version": "0.1.0", "budget": {"k": 64}}
    ),
}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        body = ANSWERS.get(self.path, "<html>").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_version_state_and_digest_are_told() -> None:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        found, strange = about(url), about(f"{url}/nothing")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert found == {
        "server version": "0.32.0",
        "autoprune state": "autoprune",
        "autoprune digest": "abc",
        "autoprune version": "0.1.0",
        "autoprune budget": "64",
    }
    assert strange == {}


def test_a_server_that_is_down_says_nothing() -> None:
    assert about(f"http://127.0.0.1:{free_port()}") == {}
