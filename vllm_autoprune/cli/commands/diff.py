"""`diff`: two states, field by field.

Knows nothing about what counts as a difference.
"""

from __future__ import annotations

import argparse
import dataclasses

from vllm_autoprune.cli.command import Command
from vllm_autoprune.cli.render import WIDTH, as_json, brief, table
from vllm_autoprune.report.compare import Comparison, compare
from vllm_autoprune.tpdsl.states.load import load_state


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", help="file, or name of a shipped state")
    parser.add_argument("second", help="file, or name of a shipped state")


def _run(options: argparse.Namespace) -> int:
    found = compare(load_state(options.first), load_state(options.second))
    if options.json:
        print(as_json({**dataclasses.asdict(found), "same_behaviour": found.same_behaviour}))
    else:
        print(_told(found, options.first, options.second))
    return 0


def _told(found: Comparison, first: str, second: str) -> str:
    said = [digest[:12] for digest in found.digests]
    verdict = f"same digest {said[0]}: both keep the same tokens"
    if not found.same_behaviour:
        verdict = f"digests differ: {said[0]} and {said[1]}"
    if not found.changes:
        return f"{verdict}\nno field differs"
    rows = [
        [
            change.where,
            "-" if change.kind == "added" else brief(change.before),
            "-" if change.kind == "removed" else brief(change.after),
        ]
        for change in found.changes
    ]
    return f"{verdict}\n\n{table(['field', first, second], rows, wrap=WIDTH)}"


COMMAND = Command("compare two states field by field", _arguments, _run)
