"""`python -m benchmarks.load COMMAND`: arguments, and which function each command calls.

Knows nothing about how anything is measured.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from pydantic import ValidationError

from benchmarks.load import arguments
from benchmarks.load.errors import LoadError
from vllm_autoprune.errors import AutopruneError


def parser() -> argparse.ArgumentParser:
    """All commands."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    commands = made.add_subparsers(dest="command", required=True)
    for name, (told, fill, _) in COMMANDS.items():
        fill(commands.add_parser(name, help=told, description=told))
    return made


def main(given: Sequence[str] | None = None) -> int:
    """0: all valid; 1: something is not, or broke; 2: a wrong call; 130: stopped."""
    chosen = parser().parse_args(given)
    signal.signal(signal.SIGTERM, _stop)  # so that servers are ended as by Ctrl-C
    try:
        return COMMANDS[chosen.command][2](chosen)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        print(f"load: {place}: {first['msg']}".replace(": :", ":"), file=sys.stderr)
        return 2
    except (AutopruneError, OSError) as error:
        print(f"load: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("load: stopped, no server is left running", file=sys.stderr)
        return 130


def _stop(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _prepare(chosen: argparse.Namespace) -> int:
    from benchmarks.load.prepared import prepare

    made = prepare(arguments.workload(chosen), Path(chosen.out))
    print(f"{chosen.out}: {len(made.measured)} requests, {len(made.bodies):,} bytes, {made.digest}")
    return 0


def _run(chosen: argparse.Namespace) -> int:
    from benchmarks.load.run import run
    from benchmarks.load.table import lines

    result = run(arguments.one(chosen), chosen.workers)
    print("\n".join(lines(result)))
    return 0 if result.verdict.valid else 1


def _paired(chosen: argparse.Namespace) -> int:
    from benchmarks.load.page import write
    from benchmarks.load.paired import measure

    out = Path(chosen.out)
    paired = measure(arguments.plan(chosen), out)
    if not paired.made:
        raise LoadError(paired.broken or "nothing was measured")
    runs = paired.runs(out)
    bad = sum(not run.result.verdict.valid for run in runs)
    print(f"{write(out)}: {len(runs)} runs, {bad} of them not valid")
    if paired.broken:
        print(f"load: ended early: {paired.broken}", file=sys.stderr)
    return 1 if bad or paired.broken else 0


def _report(chosen: argparse.Namespace) -> int:
    from benchmarks.load.page import write

    print(write(Path(chosen.folder)))
    return 0


def _check(chosen: argparse.Namespace) -> int:
    from benchmarks.load.crosscheck import check

    agreed = check(arguments.cross(chosen))
    print("\n".join(agreed.lines()))
    return 0 if agreed.holds else 1


Command = tuple[
    str,
    Callable[[argparse.ArgumentParser], None],
    Callable[[argparse.Namespace], int],
]

COMMANDS: Mapping[str, Command] = {
    "prepare": ("draw and encode a workload", arguments.add_prepare, _prepare),
    "run": ("send a workload to a server, once", arguments.add_run, _run),
    "paired": (
        "stock, base policy and AutoPrune under the same load, in ABBA order, as a report",
        arguments.add_paired,
        _paired,
    ),
    "report": ("make the page of a paired experiment anew", arguments.add_report, _report),
    "check": ("one point against vllm bench serve", arguments.add_check, _check),
}

if __name__ == "__main__":
    sys.exit(main())
