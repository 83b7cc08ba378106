"""`python -m benchmarks.load COMMAND`: load tests of a served vision-language model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from benchmarks import BenchmarkError
from benchmarks.load.paired import choose_arms, measure
from benchmarks.load.report import write_report
from benchmarks.load.settings import PairedOptions, PrepareOptions, ReportOptions
from benchmarks.load.workload import make_workload, prepare
from benchmarks.server import end_servers_on_sigterm
from vllm_autoprune.cli.flags import add_flags, flag_problems, read_flags
from vllm_autoprune.cli.output import CommandParser, format_error
from vllm_autoprune.errors import AutopruneError, ConfigError
from vllm_autoprune.record_file import FrozenModel

_FLAGS = {"as_json": "--json"}
"""Flags that are not named like their field."""


def parse_arguments(argv: Sequence[str]) -> tuple[str, Any]:
    """The command and its options; exits with status 2 where any is wrong."""
    parser = CommandParser(prog="python -m benchmarks.load", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (text, model, _) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if model is ReportOptions:
            command.add_argument("folder", help="folder of a paired experiment")
        fields = [field for field in model.model_fields if field != "folder"]
        add_flags(command.add_argument_group("options"), model, _FLAGS, fields)
    flags = parser.parse_args(argv)
    try:
        return flags.command, read_flags(_COMMANDS[flags.command][1], flags)
    except ValidationError as error:
        problems = ConfigError("options", flag_problems(error, _FLAGS))
        parser.error(" ".join(format_error(problems).split()))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: all valid; 1: invalid or failed; 2: wrong arguments; 130: interrupted."""
    command, options = parse_arguments(sys.argv[1:] if argv is None else argv)
    end_servers_on_sigterm()
    try:
        return _COMMANDS[command][2](options)
    except (AutopruneError, OSError) as error:
        text = format_error(error) if isinstance(error, AutopruneError) else str(error)
        print(f"load: {' '.join(text.split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("load: stopped, no server is left running", file=sys.stderr)
        return 130


def _prepare(options: PrepareOptions) -> int:
    workload = prepare(make_workload(options, options.model), options.out)
    print(f"{options.out}: {len(workload.measured)} requests, {workload.digest}")
    return 0


def _paired(options: PairedOptions) -> int:
    paired = measure(options, choose_arms(options))
    if not paired.runs:
        raise BenchmarkError(paired.broken or "nothing was measured")
    status = _report(ReportOptions(folder=options.out, as_json=options.as_json))
    if paired.broken:
        print(f"load: ended early: {paired.broken}", file=sys.stderr)
    return 1 if paired.broken else status


def _report(options: ReportOptions) -> int:
    report, invalid = write_report(options.folder)
    text = f"{report['answer']}\n{report['report']}: {invalid} runs are not valid"
    print(json.dumps(report) if options.as_json else text)
    return 1 if invalid else 0


_COMMANDS: Mapping[str, tuple[str, type[FrozenModel], Callable[[Any], int]]] = {
    "prepare": ("draw and encode the requests of a workload", PrepareOptions, _prepare),
    "paired": (
        "stock, base policy and AutoPrune under the same load, in ABBA order, as a report",
        PairedOptions,
        _paired,
    ),
    "report": ("write the page of a paired experiment again", ReportOptions, _report),
}

if __name__ == "__main__":
    sys.exit(main())
