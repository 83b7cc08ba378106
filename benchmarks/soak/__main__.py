"""``python -m benchmarks.soak``: serve mini-LLaVA pruned, keep it busy, judge what was seen.

Knows nothing about what is promised: ``verdict`` does. Exit status 0 where all of it holds.

Every cache of the server is small, so that it is full before the warm-up is over: what still grows
then is a leak.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.demo.cost import kv_layout, visual_tokens
from benchmarks.minillava.split import CLIP, LLAVA
from benchmarks.server import serve
from benchmarks.soak.accounts import compared, reading
from benchmarks.soak.client import keep_busy
from benchmarks.soak.memory import watched
from benchmarks.soak.mix import Mix
from benchmarks.soak.verdict import Verdict

STATE, BUDGET = "autoprune", 32
START = 1200.0
"""Seconds that the server may take to start, on a machine that has much else to do."""

LOOKS = 200
"""At memory, over the whole run; but never more than one a second."""


def flags(users: int) -> tuple[str, ...]:
    """How the server is started: 16 blocks of 32 tokens for each user, who needs 11 at most."""
    return (
        *("--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "1024"),
        *("--block-size", "32", "--num-gpu-blocks-override", str(16 * users)),
        *("--max-num-seqs", str(users), "--mm-processor-cache-gb", "0.02"),
        *("--limit-mm-per-prompt", '{"image": 2}'),
        *("--autoprune-state", STATE, "--autoprune-budget", str(BUDGET)),
        *("--autoprune-text-tower", str(CLIP), "--autoprune-requests", "states"),
        *("--autoprune-feature-cache-gb", "0.005"),
    )


def soak(minutes: float, users: int, seed: int, log: Path) -> Verdict:
    """Serve, ask, compare; raises ServerDied where the server does not come up."""
    with serve(LLAVA, *flags(users), log=log, patience=START) as server:
        mix = Mix(server.model, visual_tokens(LLAVA), STATE, BUDGET)
        before = reading(server.get("/metrics"))
        with watched(server.process.pid, max(1.0, minutes * 60 / LOOKS)) as samples:
            tally = keep_busy(server.url, mix.draw, users, minutes * 60, seed)
        after = reading(server.get("/metrics"))
    lines = compared(before, after, tally, kv_layout(LLAVA).bytes_per_token)
    command = f"python -m benchmarks.soak --minutes {minutes:g} --users {users} --seed {seed}"
    return Verdict(minutes, users, tally, lines, samples, command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write JSON, print the verdict."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--users", type=int, default=16, help="requests at once (default: 16)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("out/soak"), help="folder for JSON and log"
    )
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    verdict = soak(options.minutes, options.users, options.seed, options.out / "server.log")
    text = json.dumps(verdict.plain(), indent=1)
    (options.out / "soak.json").write_text(text + "\n", encoding="utf-8")
    print(verdict.told())
    return 1 if verdict.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
