"""`list`: the states that ship, one line each."""

from __future__ import annotations

import argparse

from vllm_autoprune.cli.commands import Command
from vllm_autoprune.cli.output import as_json, format_table
from vllm_autoprune.tpdsl.loading import load_state, shipped_states
from vllm_autoprune.tpdsl.materialize import materialize


def _arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def _run(options: argparse.Namespace) -> int:
    records = [_record(name) for name in sorted(shipped_states())]
    if options.json:
        print(as_json(records))
        return 0
    head = ["state", "base policy", "K", "exchanges", "reads the question", "shared core"]
    rows = [
        [
            str(record["name"]),
            str(record["base_policy"]),
            str(record["budget"]),
            str(record["exchanges"]),
            "yes" if record["reads_instruction"] else "no",
            f"{record['core']} of K" if record["core"] else "-",
        ]
        for record in records
    ]
    print(format_table(head, rows, "<<>><<"))
    print(
        f"\n{len(records)} states. K is each state's own; --autoprune-budget serves another one. "
        "More: vllm-autoprune show NAME"
    )
    return 0


def _record(name: str) -> dict[str, object]:
    policy = materialize(load_state(name))
    return {
        "name": name,
        "base_policy": policy.base.name,
        "budget": policy.budget,
        "exchanges": policy.quota,
        "reads_instruction": policy.reads_instruction,
        "core": policy.core,
        "digest": policy.state.digest,
    }


COMMAND = Command("list the states that ship", _arguments, _run)
