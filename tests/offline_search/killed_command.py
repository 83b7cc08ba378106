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
from collections.abc import Iterator
from pathlib import Path
from random import Random

import offline_search.evaluator
import offline_search.proposer
import offline_search.report
import offline_search.search  # noqa: F401
from offline_search.ledger import Ledger
from vllm_autoprune.cli.main import main
from vllm_autoprune.tpdsl.loading import load_state

load_state("autoprune")


def arguments(url: str, folder: Path, ledger: Path) -> list[str]:
    """Command line of every run."""
    return [
        "search", "--data", str(folder), "--ledger", str(ledger), "--resume", "--server-url", url,
        "--proposer-url", url, "--proposer-model", "m", "--budget", "8", "--rounds", "3",
        "--per-round", "3", "--strategy", "autoprune+", "--json",
    ]  # fmt: skip


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
            code = main(arguments(url, folder, ledger))
        os._exit(code)
    return child


def complete_lines(ledger: Path) -> bytes:
    """Complete lines of a ledger."""
    content = ledger.read_bytes() if ledger.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def kill_repeatedly(
    url: str, folder: Path, ledger: Path, count: int, longest: float
) -> Iterator[bool]:
    """Whether each kill hit a running command; asserts that no recorded line is lost."""
    rng = Random(7)
    recorded = b""
    for _ in range(count):
        child = start_command(url, folder, ledger)
        time.sleep(rng.uniform(0.02, longest))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert complete_lines(ledger).startswith(recorded), "a kill lost what was recorded"
        recorded = complete_lines(ledger)
        yield os.WIFSIGNALED(status)


def ledger_digest(ledger: Path) -> str:
    """Digest of a ledger's content."""
    with Ledger(ledger) as opened:
        return opened.digest()


def run() -> None:
    """Search once without and once with interruptions; print exit codes and digests."""
    url, folder, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    start = time.monotonic()
    _, status = os.waitpid(start_command(url, folder, folder / "whole.jsonl"), 0)
    longest = time.monotonic() - start
    cut = folder / "cut.jsonl"
    hit = sum(kill_repeatedly(url, folder, cut, count, longest / 2))
    refused = 0
    if len(sys.argv) > 4:
        _, refused = os.waitpid(start_command(url, folder, cut, int(sys.argv[4])), 0)
    _, ended = os.waitpid(start_command(url, folder, cut), 0)
    codes = [os.waitstatus_to_exitcode(code) for code in (status, refused, ended)]
    print(hit, *codes, ledger_digest(folder / "whole.jsonl"), ledger_digest(cut))


if __name__ == "__main__":
    run()
