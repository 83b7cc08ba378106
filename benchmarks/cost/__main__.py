"""`python -m benchmarks.cost COMMAND`: what pruning costs and what it saves.

Only the module of the chosen command is imported, since not every machine has what the others need.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from benchmarks.common.command import run_command
from vllm_autoprune.cli.output import CommandParser

_COMMANDS = {
    "agents": "tokens that a conversation of screenshots computes, by turn and by client",
    "cells": "requests/s and time to first token with blank cells dropped before the tower",
    "clips": "requests/s and time to first token of clips, beside stock vLLM and EVS",
    "curve": "load curves by `vllm bench serve`, and how busy API servers and GPU are",
    "efficiency": "FLOPs, prefill, decode and KV cache of each policy, as a table",
    "front_end": "processor time that the plugin adds to an API server, per request",
    "kernels": "time of selections on a GPU by Triton's kernels and by torch's loops",
    "launches": "kernels that a selection launches on a GPU, counted and modelled without one",
    "offline": "prompts and answers of `LLM()` in Python, stock and pruned",
    "photo": "a photo of twelve megapixels on a small share of a GPU's memory",
    "selection": "time of token selection, compared with the published code",
    "soak": "a pruned server under mixed load: errors, memory growth, metrics",
}
"""Help of each command; its module has ``OPTIONS`` and ``run``."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command and its options; ``run`` is the function that runs it."""
    parser = CommandParser(
        prog="python -m benchmarks.cost",
        description="What pruning costs and what it saves.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name in arguments[:1]:
            module = importlib.import_module(f"benchmarks.cost.{name}")
            for flag, settings in module.OPTIONS.items():
                command.add_argument(flag, **settings)
            command.set_defaults(run=module.run)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 1 with one line if it fails, 130 if stopped."""
    words = sys.argv[1:] if arguments is None else arguments
    name = " ".join(["cost", *words[:1]])
    return run_command(name, lambda: _run(parse_arguments(words)))


def _run(options: argparse.Namespace) -> int:
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
