"""Run one sub-command of `vllm-autoprune`, and print errors without a traceback."""

from __future__ import annotations

import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from io import TextIOWrapper

from vllm_autoprune import AutopruneError
from vllm_autoprune.cli.commands import (  # noqa: F401  (registers the commands)
    SUMMARIES,
    costs,
    diff,
    doctor,
    eval,
    explain,
    search,
    selftest,
    states,
)
from vllm_autoprune.cli.flags import COMMANDS
from vllm_autoprune.cli.output import (
    CommandParser,
    discard_output,
    error_as_json,
    print_text,
)
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.tpdsl.loading import suggest_name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; exit status 0 on success, 1 on failure, 2 for wrong arguments."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = Namespace()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # file names may not be Unicode
            stream.reconfigure(errors="backslashreplace")
    try:
        if words and not words[0].startswith("-") and words[0] not in SUMMARIES:
            suggestion = suggest_name(words[0], list(SUMMARIES))
            parser().error(f"no command {words[0]!r}: {suggestion}")
        options = parser().parse_args(words)
        return int(options.run(options))
    except SystemExit as ended:
        _print_record(words, ended.__cause__)
        raise
    except AutopruneError as error:
        _print_record(words, error)
        print(f"vllm-autoprune {words[0]}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        discard_output()  # the reader has closed the pipe
        return 1
    except KeyboardInterrupt as interrupt:
        # If --resume can continue the command, the text of the interrupt tells what was kept.
        text = str(interrupt)
        print(f"vllm-autoprune {words[0]}: {text or 'stopped'}", file=sys.stderr)
        if text:
            print(_resuming_command(words, options), file=sys.stderr)
        return 130  # as in shells: 128 + SIGINT


def _print_record(words: Sequence[str], error: BaseException | None) -> None:
    """Print an :class:`AutopruneError` as JSON if ``words`` contain ``--json``."""
    if "--json" not in words or not isinstance(error, AutopruneError):
        return
    try:
        print_text(error_as_json(error))
    except ConfigError as unwritten:
        print(f"vllm-autoprune {words[0]}: {unwritten}", file=sys.stderr)


def _resuming_command(words: Sequence[str], options: Namespace) -> str:
    """Command line that resumes an interrupted command; dots replace keys, headers, passwords."""
    fields = vars(options)
    secrets = [
        fields.get("api_key"),
        *fields.get("header", ()),
        *fields.get("proposer_header", ()),
    ]
    hidden = []
    for word in words:
        name, equals, value = word.partition("=")
        if word in secrets or value in secrets:
            word = f"{name}{equals}..." if equals else "..."
        hidden.append(re.sub("//[^/]*@", "//...@", word))
    if "--resume" not in words:
        hidden.append("--resume")
    return shlex.join(["vllm-autoprune", *hidden])


def parser() -> ArgumentParser:
    """Parser of all sub-commands; the help that lists them is in ``vllm_autoprune_command``."""
    top = CommandParser(prog="vllm-autoprune", add_help=False)
    commands = top.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, text in SUMMARIES.items():
        command = COMMANDS[name]
        entry = commands.add_parser(
            name, description=f"{text[:1].upper()}{text[1:]}.", epilog=command.epilog
        )
        for add in command.arguments:
            add(entry)
        entry.add_argument(
            "--json", action="store_true", help="print machine-readable output"
        )
        entry.set_defaults(run=command.run)
    return top
