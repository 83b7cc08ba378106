"""`python -m benchmarks.cost COMMAND`: what pruning costs and what it saves.

Only the module of the chosen command is imported, since not every machine has what the others need.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from benchmarks.server import end_servers_on_sigterm
from vllm_autoprune.errors import AutopruneError

COMMANDS: Mapping[str, tuple[str, str]] = {
    "efficiency": (
        "efficiency",
        "FLOPs, prefill, decode, KV cache and memory of each policy, as a table",
    ),
    "depth": (
        "efficiency",
        "time to first token at full depth, composed from two efficiency tables",
    ),
    "gpu": ("gpu", "what a machine with a GPU shows in eight minutes, with or without vLLM"),
    "selection": (
        "selection",
        "time of token selection, compared with the published code and the prefill",
    ),
    "soak": ("soak", "a pruned server under mixed load: errors, memory growth, metrics"),
}
"""Module and help of each command."""


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """All commands, and the arguments of the given one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cost", description="What pruning costs and what it saves."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        added = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        if name == command:
            _import_module(name).add_arguments(added, name)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of the command; 1 with one line where it fails, 130 where it is stopped."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = build_parser(arguments[0] if arguments else None).parse_args(arguments)
    end_servers_on_sigterm()
    try:
        on_gpu = options.command == "selection" and options.device == "gpu"
        return int(_import_module("gpu" if on_gpu else options.command).run(options))
    except KeyboardInterrupt:
        print(f"{options.command}: stopped, no server is left running", file=sys.stderr)
        return 130
    except AutopruneError as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 1


def _import_module(command: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.cost.{COMMANDS[command][0]}")


if __name__ == "__main__":
    sys.exit(main())
