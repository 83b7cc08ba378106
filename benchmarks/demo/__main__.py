"""`python -m benchmarks.demo`: arguments, what is printed, and how it ends.

Knows nothing about how anything is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.demo.stop import Stopper

# Whatever is slow to import is imported in `main`, when Ctrl-C is already looked after.

ROUNDS = 40
SCENES = 25


def parser() -> argparse.ArgumentParser:
    """The options; each has a default."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.demo",
        description="Serve the embedded mini-LLaVA stock and pruned, and compare the two.",
    )
    made.add_argument("--scenes", type=_positive, default=SCENES, help="scenes to ask about")
    made.add_argument("--rounds", type=_sample, default=ROUNDS, help="timed requests a row")
    made.add_argument("--state", default="minillava", help="pruning state: a file or a name")
    made.add_argument("--model", type=Path, help="LLaVA checkpoint instead of the embedded one")
    made.add_argument("--text-tower", type=Path, help="CLIP checkpoint that belongs to it")
    made.add_argument("--out", type=Path, default=Path("out/demo"), help="where files are written")
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 with a complete table, 130 after Ctrl-C, 1 where something failed."""
    options = parser().parse_args(arguments)
    stopper = Stopper()
    try:
        from benchmarks.demo.show import demo

        demo(options, stopper)
    except BaseException as error:
        # Whatever was interrupted may have raised something else on the way out.
        if stopper.signum:
            stopper.say()
            return stopper.status
        if isinstance(error, Exception):
            from benchmarks.demo.failure import one_line

            print(f"demo: {one_line(error)}", file=sys.stderr)
            return 1
        raise
    return 0


def _positive(text: str) -> int:
    return _whole(text, 1)


def _sample(text: str) -> int:
    return _whole(text, 2)  # quartiles of one request would mean nothing


def _whole(text: str, least: int) -> int:
    number = int(text) if text.isdecimal() else 0
    if not least <= number <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to 1000")
    return number


if __name__ == "__main__":
    sys.exit(main())
