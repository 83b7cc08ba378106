"""Repeatedly killed runs of `vllm-autoprune search`: ``python -m ... URL FOLDER KILLS [BYTES]``.

Forks after all imports, so that kills hit the search and not an import. Every run is the command
itself, against an endpoint over HTTP. BYTES limits the size of the ledger in one run, like a full
disk.
"""

from __future__ import annotations

import contextlib
import os
import resource
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


def start_command(url: str, folder: Path, ledger: Path, max_bytes: int | None = None) -> int:
    """Run the command in a child process; returns its id."""
    child = os.fork()
    if child == 0:
        if max_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
        with (
            Path(os.devnull).open("w") as nothing,
            (folder / "errors").open("a") as errors,
            contextlib.redirect_stdout(nothing),
            contextlib.redirect_stderr(errors),
        ):
            code = main([
                "search", "--data", str(folder), "--ledger", str(ledger), "--resume",
                "--server-url", url, "--proposer-url", f"{url}/v1", "--proposer-model", "m",
                "--budget", "8", "--rounds", "3", "--per-round", "3", "--strategy", "autoprune+",
                "--json",
            ])  # fmt: skip
        os._exit(code)
    return child


def kill_repeatedly(url: str, folder: Path, ledger: Path, count: int, longest: float) -> int:
    """How many kills hit a running command; asserts that no recorded line is lost."""
    rng, recorded, hits = Random(7), b"", 0
    for _ in range(count):
        child = start_command(url, folder, ledger)
        time.sleep(rng.uniform(0.02, longest))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        content = ledger.read_bytes() if ledger.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]
        assert complete.startswith(recorded), "a kill lost what was recorded"
        recorded = complete
        hits += os.WIFSIGNALED(status)
    return hits


def run() -> None:
    """Search once without and once with interruptions; print exit codes and digests."""
    url, folder, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    complete, cut = folder / "whole.jsonl", folder / "cut.jsonl"
    start = time.monotonic()
    _, status = os.waitpid(start_command(url, folder, complete), 0)
    longest = time.monotonic() - start
    hits = kill_repeatedly(url, folder, cut, count, longest / 2)
    refused = 0
    if len(sys.argv) > 4:
        _, refused = os.waitpid(start_command(url, folder, cut, int(sys.argv[4])), 0)
    _, ended = os.waitpid(start_command(url, folder, cut), 0)
    codes = [os.waitstatus_to_exitcode(code) for code in (status, refused, ended)]
    print(hits, *codes, *(digest_records(read_ledger(ledger)) for ledger in (complete, cut)))


if __name__ == "__main__":
    run()
