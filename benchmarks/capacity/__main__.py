"""`python -m benchmarks.capacity`: blocks a request holds and requests that run at once.

Knows nothing about engines: each runs in a process of its own.

LLaVA-NeXT-7B's tokens (a square image of 672 pixels) on one narrow layer: blocks and requests are
counted in tokens, so that width and depth do not matter. Exit status: 0 where every promise holds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.capacity.engine import BLOCK, Ask, Seen
from benchmarks.efficiency.shapes import write_llava_next

SIDE, BUDGET = 672, 320
BLOCKS, REQUESTS, OUTPUT_TOKENS = 931, 120, 12
PROMISE = 8.0


@dataclass(frozen=True)
class Compared:
    """Both engines, what the pruned one should hold, and whether it is so."""

    stock: Seen
    pruned: Seen
    predicted: int
    """Blocks of a pruned request, from its prompt's length alone."""
    ratio: float
    """Requests at once, pruned over stock."""

    @property
    def holds(self) -> bool:
        """Blocks are as predicted, and at least eight times as many requests run."""
        return self.pruned.blocks_each == self.predicted and self.ratio >= PROMISE


def predicted_blocks(prompt_tokens: int, output_tokens: int) -> int:
    """Blocks that a request holds before its last token, which no step has to keep."""
    return -(-(prompt_tokens + output_tokens - 1) // BLOCK)


def compared(stock: Seen, pruned: Seen) -> Compared:
    """Both engines beside each other."""
    predicted = predicted_blocks(pruned.prompt_tokens, OUTPUT_TOKENS)
    return Compared(stock, pruned, predicted, pruned.at_once / stock.at_once)


def markdown(found: Compared, blocks: int) -> str:
    """The table, and what it says."""
    lines = [
        f"KV cache of {blocks - 1} blocks of {BLOCK} tokens, answers of {OUTPUT_TOKENS} tokens, "
        f"{found.stock.answered} different images sent at once",
        "",
        "| | prompt tokens | blocks a request | requests at once | blocks in use | preempted |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for name, one in (("stock", found.stock), (f"K = {BUDGET}", found.pruned)):
        lines.append(
            f"| {name} | {one.prompt_tokens} | {one.blocks_each} | {one.at_once} | "
            f"{one.blocks_at_most} | {one.preempted} |"
        )
    verdict = "holds" if found.holds else "DOES NOT HOLD"
    lines += [
        "",
        f"{found.ratio:.1f} times as many requests at once; {found.predicted} blocks a request "
        f"predicted, {found.pruned.blocks_each} held: {verdict}",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: holds; 1: does not."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.capacity", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, default=Path("out/capacity"))
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    chosen = parser.parse_args(arguments)
    folder = write_llava_next(chosen.out / "shape", layers=1, tower_layers=2, width=128)
    ask = Ask(
        model=str(folder), side=SIDE, blocks=BLOCKS, requests=chosen.requests,
        output_tokens=OUTPUT_TOKENS,
    )  # fmt: skip
    stock = _in_a_process(ask, chosen.out / "stock")
    pruned = _in_a_process(
        ask.model_copy(update={"state": "autoprune", "budget": BUDGET}), chosen.out / "pruned"
    )
    found = compared(stock, pruned)
    told = {**asdict(found), "stock": stock.model_dump(), "pruned": pruned.model_dump()}
    (chosen.out / "capacity.json").write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told) if chosen.json else markdown(found, BLOCKS))
    return 0 if found.holds else 1


def _in_a_process(ask: Ask, folder: Path) -> Seen:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ask.json").write_text(ask.model_dump_json())
    with (folder / "log").open("w") as log:
        ended = subprocess.run(
            [sys.executable, "-m", "benchmarks.capacity.engine", str(folder / "ask.json")],
            env={"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            check=False,
        )
    if ended.returncode:
        raise SystemExit(f"capacity: the engine ended with {ended.returncode}; see {folder}/log")
    return Seen.model_validate_json(ended.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
