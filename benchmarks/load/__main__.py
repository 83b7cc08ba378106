"""`python -m benchmarks.load COMMAND`: load tests of a served vision-language model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.common import BenchmarkError
from benchmarks.load.settings import (
    OutputOptions,
    PairedOptions,
    PrepareOptions,
    ReportOptions,
    RunOptions,
    add_options,
    read_options,
)
from benchmarks.server import end_servers_on_sigterm
from vllm_autoprune.cli.output import CommandParser, format_error
from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.record_file import FrozenModel


def parse_arguments(argv: Sequence[str]) -> tuple[str, Any]:
    """The command and its options; exits with status 2 where any is wrong."""
    parser = CommandParser(prog="python -m benchmarks.load", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (text, model, _) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        add_options(command, OutputOptions if model is ReportOptions else model)
        if model is ReportOptions:
            command.add_argument("folder", help="folder of a paired experiment")
        command.add_argument(
            "--config", metavar="FILE", help="YAML file of options; those of the command line win"
        )
    flags = vars(parser.parse_args(argv))
    try:
        return flags["command"], read_options(COMMANDS[flags["command"]][1], flags)
    except AutopruneError as error:
        parser.error(" ".join(format_error(error).split()))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: all valid; 1: invalid or failed; 2: wrong arguments; 130: interrupted."""
    command, options = parse_arguments(sys.argv[1:] if argv is None else argv)
    end_servers_on_sigterm()
    try:
        return COMMANDS[command][2](options)
    except (AutopruneError, OSError) as error:
        text = format_error(error) if isinstance(error, AutopruneError) else str(error)
        print(f"load: {' '.join(text.split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("load: stopped, no server is left running", file=sys.stderr)
        return 130


def _prepare(options: PrepareOptions) -> int:
    from benchmarks.load.workload import make_workload, prepare

    workload = prepare(make_workload(options, options.model), options.out)
    size = f"{len(workload.measured)} requests, {sum(map(len, workload.bodies)):,} bytes"
    print(f"{options.out}: {size}, {workload.digest}")
    return 0


def _run(options: RunOptions) -> int:
    from benchmarks.load.experiment import run
    from benchmarks.load.result import format_result

    result = run(options)
    print(result.model_dump_json() if options.as_json else "\n".join(format_result(result)))
    return 0 if result.verdict.valid else 1


def _paired(options: PairedOptions) -> int:
    from benchmarks.load.experiment import choose_arms, measure
    from benchmarks.load.report import write_report

    paired = measure(options, choose_arms(options))
    if not paired.runs:
        raise BenchmarkError(paired.broken or "nothing was measured")
    report = write_report(options.out)
    invalid = report.pop("invalid")
    if options.as_json:
        print(json.dumps(report))
    else:
        print(f"{report['answer']}\n{report['report']}: {len(paired.runs)} runs, "
              f"{invalid} not valid")  # fmt: skip
    if paired.broken:
        print(f"load: ended early: {paired.broken}", file=sys.stderr)
    return 1 if invalid or paired.broken else 0


def _report(options: ReportOptions) -> int:
    from benchmarks.load.report import write_report

    report = write_report(options.folder)
    del report["invalid"]
    text = f"{report['answer']}\n{report['report']}"
    print(json.dumps(report) if options.as_json else text)
    return 0


COMMANDS: Mapping[str, tuple[str, type[FrozenModel], Callable[[Any], int]]] = {
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
