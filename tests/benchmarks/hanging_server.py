"""Stands in for `vllm serve`: has a child process, and never answers a question.

Arguments: port, a file for process ids, and whether it gets healthy.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.fake_server import Body, Reply, fake_server


def main() -> None:
    port = int(sys.argv[1])
    pids = Path(sys.argv[2])
    healthy = sys.argv[3] == "healthy"
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def hang(body: Body) -> Reply:
        pids.with_suffix(".asked").touch()
        return Reply(ttft=600.0)

    with fake_server(
        hang, model=None, pages={"/health": "" if healthy else None}, port=port
    ):
        pids.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
        pids.with_suffix(".new").rename(pids)
        signal.pause()


if __name__ == "__main__":
    main()
