"""Repeatedly killed runs of `vllm-autoprune search`: ``python -m ... URL FOLDER KILLS``.

Forks after all imports, so that kills hit the search and not an import. Every run is the command
itself, against an endpoint over HTTP.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from random import Random

import offline_search.search  # noqa: F401
from offline_search.ledger import digest_records, read_ledger
from vllm_autoprune.cli.main import main
from vllm_autoprune.tpdsl.loading import load_state

load_state("autoprune")
URL = sys.argv[1]
FOLDER = Path(sys.argv[2])
COMPLETE = FOLDER / "complete.jsonl"
CUT = FOLDER / "cut.jsonl"


def run_command(ledger: Path, seconds: float = 600.0) -> int:
    """Exit code of the command in a child process; negative where it was killed after a time."""
    child = os.fork()
    if child == 0:
        with (FOLDER / "errors").open("a") as sys.stderr:
            sys.stdout = sys.stderr
            code = main(
                [
                    "search",
                    "--data",
                    str(FOLDER),
                    "--ledger",
                    str(ledger),
                    "--resume",
                    "--server-url",
                    URL,
                    "--proposer-url",
                    f"{URL}/v1",
                    "--proposer-model",
                    "m",
                    "--budget",
                    "8",
                    "--rounds",
                    "3",
                    "--per-round",
                    "3",
                ]
            )
        os._exit(code)
    ends = time.monotonic() + seconds
    status = (0, 0)
    while time.monotonic() < ends and not (status := os.waitpid(child, os.WNOHANG))[0]:
        time.sleep(0.001)
    if not status[0]:
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status[1])


rng = Random(7)
recorded = b""
start = time.monotonic()
codes = [run_command(COMPLETE)]
longest = time.monotonic() - start
kills = 0
for _ in range(int(sys.argv[3])):
    kills += run_command(CUT, rng.uniform(0.02, longest / 2)) < 0
    content = CUT.read_bytes() if CUT.exists() else b""
    complete = content[: content.rfind(b"\n") + 1]
    assert complete.startswith(recorded), "a kill lost what was recorded"
    recorded = complete
codes.append(run_command(CUT))
print(kills, *codes, *(digest_records(read_ledger(path)) for path in (COMPLETE, CUT)))
