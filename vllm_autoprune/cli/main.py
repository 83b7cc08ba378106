"""Entry point of `vllm-autoprune`: picks the sub-command, turns errors into one line.

Knows nothing about what the commands do.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from vllm_autoprune import AutopruneError, __version__
from vllm_autoprune.cli.command import Command
from vllm_autoprune.cli.commands import (
    atoms,
    cost,
    diff,
    doctor,
    eval,
    explain,
    materialize,
    schema,
    search,
    select,
    selftest,
    show,
    support,
    validate,
)
from vllm_autoprune.cli.render import as_json, error_record, told

COMMANDS: dict[str, Command] = {
    "validate": validate.COMMAND,
    "show": show.COMMAND,
    "diff": diff.COMMAND,
    "atoms": atoms.COMMAND,
    "schema": schema.COMMAND,
    "materialize": materialize.COMMAND,
    "select": select.COMMAND,
    "explain": explain.COMMAND,
    "cost": cost.COMMAND,
    "search": search.COMMAND,
    "eval": eval.COMMAND,
    "doctor": doctor.COMMAND,
    "selftest": selftest.COMMAND,
    "support": support.COMMAND,
}

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 where all is well, 1 where something is not, 2 for a wrong call."""
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except AutopruneError as error:
        if options.json:
            print(as_json(error_record(error)))
        print(f"vllm-autoprune {options.command}: {told(error)}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader has left; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(
        prog="vllm-autoprune",
        description="Read, check, compare and see the states that decide which visual tokens stay.",
        epilog="Exit status: 0 all is well, 1 something is not, 2 a wrong call.",
    )
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        entry = commands.add_parser(
            name,
            help=command.help,
            description=command.help[:1].upper() + command.help[1:] + ".",
            epilog=command.epilog,
        )
        command.arguments(entry)
        entry.add_argument("--json", action="store_true", help="print machine-readable output")
        entry.set_defaults(run=command.run)
    return top


if __name__ == "__main__":
    raise SystemExit(main())
