"""`python -m benchmarks.load COMMAND`: load tests of a served vision-language model."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from pydantic import ValidationError

from benchmarks.common import BenchmarkError
from benchmarks.load import arguments
from benchmarks.load.config_file import FLAG, expand_config
from benchmarks.load.option_types import OneLineParser
from vllm_autoprune.errors import AutopruneError, ProblemsError


def build_parser() -> argparse.ArgumentParser:
    """All commands."""
    return _build_parsers()[0]


def _build_parsers() -> tuple[argparse.ArgumentParser, Mapping[str, OneLineParser]]:
    """The parser, and those of its commands by name."""
    parser = OneLineParser(prog="python -m benchmarks.load", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    by_name = {}
    for name, (text, add_arguments, _) in COMMANDS.items():
        by_name[name] = commands.add_parser(name, help=text, description=text)
        add_arguments(by_name[name])
        by_name[name].add_argument(
            FLAG, metavar="FILE", help="YAML file of options; those of the command line win"
        )
    return parser, by_name


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, with those of ``--config`` files; exits with status 2 where any is wrong."""
    parser, commands = _build_parsers()
    command, *rest = [*argv] or [""]
    if command in commands:
        try:
            argv = [command, *expand_config(rest, commands[command])]
        except BenchmarkError as error:
            commands[command].error(str(error))
        # The command's own parser knows which of its options was meant.
        known, unknown = commands[command].parse_known_args(argv[1:])
        if unknown:
            commands[command].error(f"unrecognized arguments: {' '.join(unknown)}")
        known.command = command
        return known
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: all valid; 1: invalid or failed; 2: wrong arguments; 130: interrupted."""
    chosen = parse_arguments(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, _stop)  # servers are ended as after Ctrl-C
    try:
        return COMMANDS[chosen.command][2](chosen)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        print(f"load: {place}: {first['msg']}".replace(": :", ":"), file=sys.stderr)
        return 2
    except ProblemsError as error:
        problems = "; ".join(map(str, error.problems))
        print(f"load: {error.subject}: {problems}", file=sys.stderr)
        return 1
    except (AutopruneError, OSError) as error:
        print(f"load: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("load: stopped, no server is left running", file=sys.stderr)
        return 130


def _stop(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _prepare(chosen: argparse.Namespace) -> int:
    from benchmarks.load.prepared_requests import prepare

    workload = prepare(arguments.parse_workload(chosen), Path(chosen.out))
    size = f"{len(workload.measured)} requests, {len(workload.bodies):,} bytes"
    print(f"{chosen.out}: {size}, {workload.digest}")
    return 0


def _run(chosen: argparse.Namespace) -> int:
    from benchmarks.load.options import build_options
    from benchmarks.load.result import format_result
    from benchmarks.load.run import run

    result = run(build_options(chosen, chosen.url, chosen.users), chosen.workers)
    print(result.model_dump_json() if chosen.json else "\n".join(format_result(result)))
    return 0 if result.verdict.valid else 1


def _paired(chosen: argparse.Namespace) -> int:
    from benchmarks.load.page import write_report
    from benchmarks.load.paired import measure

    out = Path(chosen.out)
    paired = measure(arguments.parse_plan(chosen), out)
    if not paired.made:
        raise BenchmarkError(paired.broken or "nothing was measured")
    runs = paired.runs(out)
    invalid = sum(not run.result.verdict.valid for run in runs)
    report = write_report(out)
    if chosen.json:
        print(json.dumps(report.summary))
    else:
        print(f"{report.answer.sentence}\n{report.path}: {len(runs)} runs, {invalid} not valid")
    if paired.broken:
        print(f"load: ended early: {paired.broken}", file=sys.stderr)
    return 1 if invalid or paired.broken else 0


def _report(chosen: argparse.Namespace) -> int:
    from benchmarks.load.page import write_report

    report = write_report(Path(chosen.folder))
    print(json.dumps(report.summary) if chosen.json else f"{report.answer.sentence}\n{report.path}")
    return 0


Command = tuple[
    str,
    Callable[[argparse.ArgumentParser], None],
    Callable[[argparse.Namespace], int],
]

COMMANDS: Mapping[str, Command] = {
    "prepare": ("draw and encode the requests of a workload", arguments.add_prepare, _prepare),
    "run": ("send a workload to a server, once", arguments.add_run, _run),
    "paired": (
        "stock, base policy and AutoPrune under the same load, in ABBA order, as a report",
        arguments.add_paired,
        _paired,
    ),
    "report": ("write the page of a paired experiment again", arguments.add_report, _report),
}

if __name__ == "__main__":
    sys.exit(main())
