"""`materialize`: transfer a state to another budget or backbone, with a record of all changes."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from vllm_autoprune.backbones import BACKBONE_SHAPES, find_backbone
from vllm_autoprune.cli.commands import Command
from vllm_autoprune.cli.output import WIDTH, as_json, format_table, format_value, write_file
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.transfer import Change, check_transfer, instruction_free, transfer


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("state", help="file, or name of a shipped state")
    parser.add_argument("--budget", type=int, metavar="K", help="tokens one image contributes")
    parser.add_argument("--backbone", metavar="NAME", help=", ".join(BACKBONE_SHAPES))
    parser.add_argument(
        "--instruction-free",
        action="store_true",
        help="read no instruction, so that all questions about an image share KV blocks",
    )
    parser.add_argument("--name", help="name of the new state (default: derived from the old one)")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the new state here"
    )


def _run(options: argparse.Namespace) -> int:
    backbone = None if options.backbone is None else find_backbone(options.backbone)
    state, changes = load_state(options.state), list[Change]()
    if options.instruction_free:
        free = instruction_free(state)
        state, changes = free.state, list(free.changes)
    result = transfer(state, options.budget, backbone, options.name)
    changes += result.changes
    record = check_transfer(result, backbone)
    if record.valid and options.output is not None:
        write_file(options.output, result.state.dumps().encode())
    if options.json:
        about = {
            "name": result.state.name,
            "digest": result.state.digest,
            "budget": result.policy.budget,
            "changes": [asdict(change) for change in changes],
            "resolved": [asdict(field) for field in result.resolved],
            "valid": record.valid,
            "verdicts": [asdict(verdict) for verdict in record.verdicts],
            "state": json.loads(result.state.dumps()),
        }
        print(as_json(about))
        return 0 if record.valid else 1
    print(f"{result.state.name}: K = {result.policy.budget}, digest {result.state.digest[:12]}\n")
    rows = [[row.where, format_value(row.before), format_value(row.after), row.why]
            for row in changes]  # fmt: skip
    head, width = ["changed", "before", "after", "why"], WIDTH + 40
    print(format_table(head, rows, wrap=width) if rows else "no field changes", end="\n\n")
    rows = [[field.where, format_value(field.value), field.meaning] for field in result.resolved]
    print(format_table(["resolved", "value", "meaning"], rows, wrap=width), end="\n\n")
    print("safety check: " + ("valid" if record.valid else "fails; nothing is written"))
    for verdict in record.verdicts:
        print(f"  {'ok  ' if verdict.ok else 'FAIL'} {verdict.name}: {verdict.detail}")
    if record.valid and options.output is not None:
        print(f"\nwrote {options.output}")
    return 0 if record.valid else 1


COMMAND = Command(
    "transfer a state to another budget or backbone, and record what changed",
    _arguments,
    _run,
)
