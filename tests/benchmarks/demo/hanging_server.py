"""Stands in for `vllm serve`: has a child of its own, and never answers a question.

Knows nothing about the demo. Arguments: port, a file for notes, and whether it gets healthy.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main() -> None:
    port, notes, healthy = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "healthy"
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200 if healthy else 503)
            self.end_headers()

        def do_POST(self) -> None:
            notes.with_name("pids.asked").touch()
            time.sleep(600)

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    notes.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
    notes.with_suffix(".new").rename(notes)
    server.serve_forever()


if __name__ == "__main__":
    main()
