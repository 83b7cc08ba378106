"""`python -m benchmarks.demo`: arguments, Ctrl-C and exit status."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from vllm_autoprune.cli.output import CommandParser

# Slow imports are in `main`, once Ctrl-C is handled.

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptHandler:
    """Handles Ctrl-C, SIGTERM and SIGHUP for the rest of the process.

    An import of a large library may swallow an exception raised by a signal handler. So it is
    raised only while a server is running; otherwise the process just ends.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._guarded = False
        for each in SIGNALS:
            signal.signal(each, self._stop)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Within the block a signal raises KeyboardInterrupt, so that servers are ended."""
        self._guarded = True
        try:
            yield
        finally:
            self._guarded = False
            if self.signum:
                # The servers are ended; a second signal must not interrupt the exit.
                for each in SIGNALS:
                    signal.signal(each, signal.SIG_IGN)

    def finish(self) -> int:
        """Print the last line of an interrupted demo; the exit status, 130 after Ctrl-C."""
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h\n")  # a progress bar hides the cursor
        print("demo: stopped, no server is left running", file=sys.stderr, flush=True)
        return 128 + self.signum

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        if self._guarded:
            raise KeyboardInterrupt
        os._exit(self.finish())


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 with a complete table, 130 after Ctrl-C, 1 where something failed."""
    parser = CommandParser(
        prog="python -m benchmarks.demo",
        description="Serve two models stock and pruned: the trained mini-LLaVA, to compare "
        "answers, and one of LLaVA-1.5's proportions with random weights, to compare times.",
    )
    add, out = parser.add_argument, Path("out/demo")
    add("--scenes", type=_parse_positive, default=20, help="scenes to ask about")
    add("--state", default="minillava", help="pruning state: a file or a name")
    add("--model", type=Path, help="LLaVA checkpoint instead of the embedded one")
    add("--text-tower", type=Path, help="CLIP checkpoint that belongs to it")
    add("--out", type=Path, default=out, help="where files are written")
    add("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    interrupt = InterruptHandler()
    try:
        from benchmarks.demo.output import run_demo

        run_demo(options, interrupt.guard)
    except BaseException as error:
        # An interrupt may surface as another exception.
        if interrupt.signum:
            return interrupt.finish()
        if not isinstance(error, Exception):
            raise
        from vllm_autoprune.errors import AutopruneError

        kind = "" if isinstance(error, AutopruneError) else f"{type(error).__name__}: "
        print(f"demo: {kind}{' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _parse_positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not 1 <= number <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1000")
    return number


if __name__ == "__main__":
    sys.exit(main())
