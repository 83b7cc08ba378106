"""`python -m benchmarks.demo`: what README shows, on this machine."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.server import end_servers_on_sigterm
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.errors import AutopruneError


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 with a complete table, 130 after Ctrl-C, 1 where something failed."""
    parser = CommandParser(
        prog="python -m benchmarks.demo",
        description="Serve two models stock and pruned: the trained mini-LLaVA, to compare "
        "answers, and one of LLaVA-1.5's proportions with random weights, to compare times.",
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder of table, logs")
    options = parser.parse_args(arguments)
    # Imports of large libraries may swallow an exception, so that Ctrl-C just ends the process
    # while there is no server yet.
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from benchmarks.demo.measure import run_demo

    signal.signal(signal.SIGINT, interrupt)
    end_servers_on_sigterm()
    try:
        run_demo(options.out)
    except KeyboardInterrupt:
        print("demo: stopped, no server is left running", file=sys.stderr)
        return 130
    except AutopruneError as error:
        print(f"demo: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
