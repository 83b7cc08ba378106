"""`python -m benchmarks.load COMMAND`: load tests of a served vision-language model."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from benchmarks.common import BenchmarkError, StrictModel
from benchmarks.load.settings import (
    OptionError,
    PairedOptions,
    Parser,
    PrepareOptions,
    ReportOptions,
    RunOptions,
    add_flags,
    read_options,
)
from vllm_autoprune.errors import AutopruneError, ProblemsError


def parse_arguments(argv: Sequence[str]) -> tuple[str, Any]:
    """The command and its options; exits with status 2 where any is wrong."""
    parser = Parser(prog="python -m benchmarks.load", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    by_name = {}
    for name, (text, model, _) in COMMANDS.items():
        by_name[name] = commands.add_parser(name, help=text, description=text)
        add_flags(by_name[name], model)
        by_name[name].add_argument(
            "--config", metavar="FILE", help="YAML file of options; those of the command line win"
        )
    chosen, unknown = parser.parse_known_args(argv)
    # The command's own parser knows which of its options was meant.
    if unknown:
        by_name[chosen.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return chosen.command, read_options(COMMANDS[chosen.command][1], vars(chosen))
    except OptionError as error:
        by_name[chosen.command].error(str(error))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: all valid; 1: invalid or failed; 2: wrong arguments; 130: interrupted."""
    command, options = parse_arguments(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, _stop)  # servers are ended as after Ctrl-C
    try:
        return COMMANDS[command][2](options)
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


def _prepare(options: PrepareOptions) -> int:
    from benchmarks.load.workload import make_workload, prepare

    workload = prepare(make_workload(options, options.model), options.out)
    size = f"{len(workload.measured)} requests, {len(workload.bodies):,} bytes"
    print(f"{options.out}: {size}, {workload.digest}")
    return 0


def _run(options: RunOptions) -> int:
    from benchmarks.load.experiment import run
    from benchmarks.load.result import format_result

    result = run(options)
    print(result.model_dump_json() if options.as_json else "\n".join(format_result(result)))
    return 0 if result.verdict.valid else 1


def _paired(options: PairedOptions) -> int:
    from benchmarks.load.experiment import make_plan, measure
    from benchmarks.load.report import write_report

    paired = measure(make_plan(options), options.out)
    if not paired.made:
        raise BenchmarkError(paired.broken or "nothing was measured")
    runs = paired.runs(options.out)
    invalid = sum(not run.result.verdict.valid for run in runs)
    report = write_report(options.out)
    if options.as_json:
        print(json.dumps(report))
    else:
        print(f"{report['answer']}\n{report['report']}: {len(runs)} runs, {invalid} not valid")
    if paired.broken:
        print(f"load: ended early: {paired.broken}", file=sys.stderr)
    return 1 if invalid or paired.broken else 0


def _report(options: ReportOptions) -> int:
    from benchmarks.load.report import write_report

    report = write_report(options.folder)
    text = f"{report['answer']}\n{report['report']}"
    print(json.dumps(report) if options.as_json else text)
    return 0


COMMANDS: Mapping[str, tuple[str, type[StrictModel], Callable[[Any], int]]] = {
    "prepare": ("draw and encode the requests of a workload", PrepareOptions, _prepare),
    "run": ("send a workload to a server, once", RunOptions, _run),
    "paired": (
        "stock, base policy and AutoPrune under the same load, in ABBA order, as a report",
        PairedOptions,
        _paired,
    ),
    "report": ("write the page of a paired experiment again", ReportOptions, _report),
}

if __name__ == "__main__":
    sys.exit(main())
