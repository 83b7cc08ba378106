"""`python -m benchmarks.load COMMAND`: load tests of a served vision-language model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from benchmarks.common.command import run_command
from benchmarks.load.paired import Arm, measure
from benchmarks.load.report import REPORT
from benchmarks.load.settings import PairedOptions, RequestOptions, Workload
from benchmarks.load.workload import prepare
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.flags import add_flags, flag_problems, read_flags


class _PrepareOptions(RequestOptions):
    """Preparation of a workload."""

    model: str = Field(description="name of the served model")
    out: Path = Field(description="folder to write")


_COMMANDS: Mapping[str, tuple[str, type[RequestOptions]]] = {
    "prepare": ("draw and encode the requests of a workload", _PrepareOptions),
    "paired": (
        "stock, base policy and AutoPrune under the same load, in ABBA order, as a report",
        PairedOptions,
    ),
}


def parse_arguments(argv: Sequence[str]) -> RequestOptions:
    """The options of a command; exits with status 2 where any is wrong."""
    parser = CommandParser(prog="python -m benchmarks.load", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (text, model) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        add_flags(command.add_argument_group("options"), model, {})
    flags = parser.parse_args(argv)
    try:
        return read_flags(_COMMANDS[flags.command][1], flags)
    except ValidationError as error:
        problems = ConfigError("options", flag_problems(error, {}))
        parser.error(" ".join(str(problems).split()))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: all valid; 1: invalid or failed; 2: wrong arguments; 130: interrupted."""
    words = sys.argv[1:] if argv is None else argv
    return run_command("load", lambda: _run(parse_arguments(words)))


def _run(options: RequestOptions) -> int:
    if isinstance(options, _PrepareOptions):
        workload = prepare(Workload.of(options, options.model), options.out)
        print(f"{options.out}: {len(workload.measured)} requests, {workload.digest}")
        return 0
    assert isinstance(options, PairedOptions)
    answer, invalid, broken = measure(options, Arm.choose(options))
    print(f"{answer}\n{options.out / REPORT}: {invalid} runs are not valid")
    if broken:
        print(f"load: ended early: {broken}", file=sys.stderr)
    return 1 if broken or invalid else 0


if __name__ == "__main__":
    sys.exit(main())
