"""`materialize`: transfer a state to another budget or backbone, with a record of all changes."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from vllm_autoprune.backbones import BACKBONE_SHAPES, BackboneShape, find_backbone
from vllm_autoprune.cli.commands import Command
from vllm_autoprune.cli.output import WIDTH, as_json, format_table, format_value, write_file
from vllm_autoprune.tpdsl.atoms.safety import SafetyRecord
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.transfer import Transfer, check_transfer, instruction_free, transfer


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
    result = _transfer_state(load_state(options.state), options, backbone)
    record = check_transfer(result, backbone)
    written = record.valid and options.output is not None
    if written:
        write_file(options.output, result.state.dumps().encode())
    if options.json:
        print(as_json(_record(result, record)))
    else:
        print(_format_transfer(result, record) + (f"\n\nwrote {options.output}" if written else ""))
    return 0 if record.valid else 1


def _transfer_state(
    state: PruningState, options: argparse.Namespace, backbone: BackboneShape | None
) -> Transfer:
    if not options.instruction_free:
        return transfer(state, options.budget, backbone, options.name)
    free = instruction_free(state)
    result = transfer(free.state, options.budget, backbone, options.name)
    return dataclasses.replace(result, changes=(*free.changes, *result.changes))


def _record(result: Transfer, safety: SafetyRecord) -> dict[str, object]:
    return {
        "name": result.state.name,
        "digest": result.state.digest,
        "budget": result.policy.budget,
        "changes": [dataclasses.asdict(change) for change in result.changes],
        "resolved": [dataclasses.asdict(field) for field in result.resolved],
        "valid": safety.valid,
        "verdicts": [dataclasses.asdict(verdict) for verdict in safety.verdicts],
        "state": json.loads(result.state.dumps()),
    }


def _format_transfer(result: Transfer, safety: SafetyRecord) -> str:
    head = f"{result.state.name}: K = {result.policy.budget}, digest {result.state.digest[:12]}"
    changed = "no field changes"
    if result.changes:
        rows = [
            [c.where, format_value(c.before), format_value(c.after), c.why] for c in result.changes
        ]
        changed = format_table(["changed", "before", "after", "why"], rows, wrap=WIDTH + 40)
    rows = [[field.where, format_value(field.value), field.meaning] for field in result.resolved]
    kept = format_table(["resolved", "value", "meaning"], rows, wrap=WIDTH + 40)
    verdicts = [f"  {'ok  ' if v.ok else 'FAIL'} {v.name}: {v.detail}" for v in safety.verdicts]
    checked = "safety check: " + ("valid" if safety.valid else "fails; nothing is written")
    return "\n\n".join([head, changed, kept, "\n".join([checked, *verdicts])])


COMMAND = Command(
    "transfer a state to another budget or backbone, and record what changed",
    _arguments,
    _run,
)
