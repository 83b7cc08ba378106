"""`python -m benchmarks.demo`: arguments and exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.demo.interrupt import InterruptHandler
from vllm_autoprune.cli.output import CommandParser

# Slow imports are in `main`, once Ctrl-C is handled.

SCENES = 20


def build_parser() -> argparse.ArgumentParser:
    """The options; each has a default."""
    parser = CommandParser(
        prog="python -m benchmarks.demo",
        description="Serve two models stock and pruned: the trained mini-LLaVA, to compare "
        "answers, and one of LLaVA-1.5's proportions with random weights, to compare times.",
    )
    parser.add_argument(
        "--scenes", type=_parse_positive, default=SCENES, help="scenes to ask about"
    )
    parser.add_argument("--state", default="minillava", help="pruning state: a file or a name")
    parser.add_argument("--model", type=Path, help="LLaVA checkpoint instead of the embedded one")
    parser.add_argument("--text-tower", type=Path, help="CLIP checkpoint that belongs to it")
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), help="where files are written"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 with a complete table, 130 after Ctrl-C, 1 where something failed."""
    options = build_parser().parse_args(arguments)
    interrupt = InterruptHandler()
    try:
        from benchmarks.demo.output import run_demo

        run_demo(options, interrupt)
    except BaseException as error:
        # An interrupt may surface as another exception.
        if interrupt.signum:
            interrupt.print_message()
            return interrupt.status
        if isinstance(error, Exception):
            from benchmarks.demo.failure import describe_failure

            print(f"demo: {describe_failure(error)}", file=sys.stderr)
            return 1
        raise
    return 0


def _parse_positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not 1 <= number <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1000")
    return number


if __name__ == "__main__":
    sys.exit(main())
