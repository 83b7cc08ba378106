"""``python -m benchmarks.accuracy.yardsticks``: one table of both yardsticks.

Every base policy and shipped state beside full, resized, random and oracle, at K = N/2 to N/16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.accuracy.yardsticks.cases import build_cases
from benchmarks.accuracy.yardsticks.journal import YardstickJournal
from benchmarks.accuracy.yardsticks.measure import measure
from benchmarks.accuracy.yardsticks.report import (
    Measured,
    as_csv,
    as_json,
    as_markdown,
    write_between_markers,
)
from benchmarks.accuracy.yardsticks.table import build_rows
from benchmarks.yardsticks import YARDSTICKS, open_yardstick
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.evaluation.run import Progress

DOCS = Path(__file__).resolve().parents[3] / "docs"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, and print the table or write it into the documentation."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        measured = [_measure(name, options) for name in options.yardsticks]
    except AutopruneError as error:
        print(error, file=sys.stderr)
        return 1
    if options.write_docs:
        write_between_markers(DOCS / "accuracy.md", as_markdown(measured))
        (DOCS / "data" / "accuracy.csv").write_text(as_csv(measured), encoding="utf-8")
    else:
        print(as_json(measured) if options.json else as_markdown(measured), end="")
    return 0


def _measure(name: str, options: argparse.Namespace) -> Measured:
    yardstick = open_yardstick(name, options.checkpoint)
    progress = Progress(lambda line: print(f"{name}: {line}", file=sys.stderr, flush=True))
    cases = [
        case
        for case in build_cases(yardstick.budgets, yardstick.available, options.methods)
        if case.name not in yardstick.equal_policies
    ]
    with YardstickJournal(options.out / f"{name}.jsonl", yardstick.model) as journal:
        results = measure(yardstick, cases, options.images, journal, progress)
    rows = list(build_rows(results))
    return Measured(yardstick.name, yardstick.model, yardstick.default, yardstick.eighth, rows)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m benchmarks.accuracy.yardsticks",
        description="Measure base policies, states and controls on mini-LLaVA and mini-Qwen3-VL. "
        "A run that is stopped goes on when the command is repeated.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/yardsticks"),
        metavar="FOLDER",
        help="folder for the results",
    )
    parser.add_argument(
        "--yardsticks",
        nargs="+",
        default=list(YARDSTICKS),
        choices=YARDSTICKS,
        help="models to measure on",
    )
    parser.add_argument("--checkpoint", type=Path, help="another training of a single yardstick")
    parser.add_argument("--images", type=int, default=100, help="images of the test split")
    parser.add_argument("--methods", nargs="*", default=[], help="default: all of them")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="all rows as JSON")
    output.add_argument(
        "--write-docs",
        action="store_true",
        help="write docs/accuracy.md's tables and docs/data/accuracy.csv",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
