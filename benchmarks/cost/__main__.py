"""`python -m benchmarks.cost COMMAND`: what pruning costs and what it saves.

Each command is a module with ``add_arguments`` and ``run``; only the chosen one is imported.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType, ModuleType

from vllm_autoprune.errors import AutopruneError

COMMANDS: Mapping[str, str] = {
    "efficiency": "FLOPs, prefill, decode, KV cache, memory and score of each policy, as a table",
    "depth": "time to first token at full depth, composed from two efficiency tables",
    "gpu": "what a machine with a GPU shows in eight minutes, with or without vLLM",
    "selection": "time of token selection, compared with the published code and the prefill",
    "soak": "a pruned server under mixed load: errors, memory growth, metrics",
}


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """All commands, and the arguments of the given one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cost", description="What pruning costs and what it saves."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        added = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        if name == command:
            _import_command(name).add_arguments(added)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of the command; 1 with one line where it fails, 130 where it is stopped."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = build_parser(arguments[0] if arguments else None).parse_args(arguments)
    signal.signal(signal.SIGTERM, _stop)  # servers are ended as after Ctrl-C
    try:
        if options.command == "selection" and options.device == "gpu":
            return int(_import_command("gpu").measure_selection_loops(options.quick))
        return int(_import_command(options.command).run(options))
    except KeyboardInterrupt:
        print(f"{options.command}: stopped, no server is left running", file=sys.stderr)
        return 130
    except AutopruneError as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 1


def _import_command(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.cost.{name}")


def _stop(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
