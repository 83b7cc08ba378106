"""`vllm-autoprune search` killed again and again: ``python -m ... URL FOLDER KILLS [BYTES]``.

Knows nothing about what is asserted. Forks once everything is imported, so that a kill lands in the
search and not in an import. Each run is the command itself, against an endpoint over HTTP. With
BYTES the ledger may not grow beyond them at first: the disk is full.
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

import offline_search.evaluators.served
import offline_search.progress
import offline_search.proposers.endpoint
import offline_search.report
import offline_search.search  # noqa: F401
from offline_search.ledger import Ledger
from vllm_autoprune.cli.main import main
from vllm_autoprune.tpdsl.states.load import load_state

load_state("autoprune")


def arguments(url: str, folder: Path, ledger: Path) -> list[str]:
    """One command line, whichever run it is."""
    return [
        "search", "--data", str(folder), "--ledger", str(ledger), "--resume", "--server-url", url,
        "--proposer-url", url, "--proposer-model", "m", "--budget", "8", "--rounds", "3",
        "--per-round", "3", "--strategy", "autoprune+", "--json",
    ]  # fmt: skip


def begun(url: str, folder: Path, ledger: Path, most: int | None = None) -> int:
    """The command in a process of its own; its id."""
    child = os.fork()
    if child == 0:
        if most is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        with (
            Path(os.devnull).open("w") as nothing,
            (folder / "errors").open("a") as errors,
            contextlib.redirect_stdout(nothing),
            contextlib.redirect_stderr(errors),
        ):
            code = main(arguments(url, folder, ledger))
        os._exit(code)
    return child


def whole_lines(ledger: Path) -> bytes:
    """What of a ledger is complete."""
    content = ledger.read_bytes() if ledger.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def kills(url: str, folder: Path, ledger: Path, count: int, longest: float) -> Iterator[bool]:
    """Whether each kill found the command at work; nothing that was recorded may be lost."""
    dice = Random(7)
    recorded = b""
    for _ in range(count):
        child = begun(url, folder, ledger)
        time.sleep(dice.uniform(0.02, longest))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert whole_lines(ledger).startswith(recorded), "a kill lost what was recorded"
        recorded = whole_lines(ledger)
        yield os.WIFSIGNALED(status)


def digest(ledger: Path) -> str:
    """Of a ledger's content."""
    with Ledger(ledger) as opened:
        return opened.digest()


def run() -> None:
    """Search once without interruption, and once with; print what became of both."""
    url, folder, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    began = time.monotonic()
    _, status = os.waitpid(begun(url, folder, folder / "whole.jsonl"), 0)
    longest = time.monotonic() - began
    cut = folder / "cut.jsonl"
    hit = sum(kills(url, folder, cut, count, longest / 2))
    refused = 0
    if len(sys.argv) > 4:
        _, refused = os.waitpid(begun(url, folder, cut, int(sys.argv[4])), 0)
    _, ended = os.waitpid(begun(url, folder, cut), 0)
    codes = [os.waitstatus_to_exitcode(code) for code in (status, refused, ended)]
    print(hit, *codes, digest(folder / "whole.jsonl"), digest(cut))


if __name__ == "__main__":
    run()
