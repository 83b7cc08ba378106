"""A repeatedly killed search: ``python -m tests.offline_search.killed_search FOLDER KILLS``.

Forks after all imports, so that kills hit the search and not an import. Prints the number of kills
that hit a running search, and the digests of an uninterrupted and of the interrupted ledger.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from random import Random

from offline_search.dataset import read_dataset
from offline_search.ledger import Ledger
from offline_search.search import Search
from offline_search.settings import Settings
from tests.offline_search.replies import valid_replies
from tests.offline_search.synthetic import ScriptedProposer, SyntheticEvaluator, use_one_thread

SETTINGS = Settings(strategy="autoprune+", rounds=3, per_round=3, budgets=(8,), proposer="scripted")
REPLIES = [*valid_replies(10), "nonsense", None]


def search(folder: Path, ledger: Path, delay: float) -> str:
    """Run to the end on a ledger; returns its digest."""
    evaluator = SyntheticEvaluator(read_dataset(folder), delay=delay)
    settings = SETTINGS.model_copy(update={"evaluator": evaluator.name})
    with Ledger(ledger) as opened:
        asyncio.run(Search(settings, opened, evaluator, ScriptedProposer(REPLIES)).run())
        return opened.digest()


def run_and_kill(folder: Path, ledger: Path, after: float) -> bool:
    """Run the search in a child process and kill it; false if it had finished."""
    child = os.fork()
    if child == 0:
        search(folder, ledger, 0.01)
        os._exit(0)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def main() -> None:
    """Kill, resume to the end, and search once without interruption."""
    use_one_thread()
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    rng = Random(5)
    start = time.monotonic()
    whole = search(folder, folder / "whole.jsonl", 0.01)
    longest = (time.monotonic() - start) / 2
    ledger = folder / "killed.jsonl"
    hit = sum(run_and_kill(folder, ledger, rng.uniform(0.02, longest)) for _ in range(kills))
    print(hit, whole, search(folder, ledger, 0.0))


if __name__ == "__main__":
    main()
