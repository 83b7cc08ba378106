"""Commands on states and their language: what ships, what a state does, whether it is valid."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError

from vllm_autoprune.backbones import BACKBONE_SHAPES, find_backbone
from vllm_autoprune.cli.flags import argument, command
from vllm_autoprune.cli.output import (
    WIDTH,
    format_paragraphs,
    format_table,
    print_result,
    write_file,
)
from vllm_autoprune.errors import BudgetError, Problem, StateError
from vllm_autoprune.statistics import Estimate
from vllm_autoprune.tpdsl.atoms.safety import SafetyRecord
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, BasePolicyCall
from vllm_autoprune.tpdsl.loading import load_state, shipped_states
from vllm_autoprune.tpdsl.materialize import PruningPolicy, materialize
from vllm_autoprune.tpdsl.reference import render_language
from vllm_autoprune.tpdsl.registry import ATOMS, ROLES, AtomCall
from vllm_autoprune.tpdsl.safety import safety_check
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.transfer import (
    Change,
    check_transfer,
    instruction_free,
    list_changes,
    transfer,
)

_STATE = argument("state", help="file, or name of a shipped state")


@command("list")
def _list_states(options: argparse.Namespace) -> int:
    """List the states that ship."""
    policies = sorted((materialize(load_state(n)) for n in shipped_states()), key=_order_to_try)
    records = [
        {
            "name": policy.state.name,
            "base_policy": policy.base.name,
            "budget": policy.state.budget.rule(),
            "exchanges": "all" if policy.quota == policy.budget else policy.quota,
            "reads_instruction": policy.reads_instruction,
            "core": policy.core,
            "digest": policy.state.digest,
        }
        for policy in policies
    ]
    head = ["state", "base policy", "K", "exchanges", "reads the question", "tokens of the core"]
    rows = [list(record.values())[:-1] for record in records]
    about = (
        f"{len(policies)} states: found here, published, the paper's, ablations; of each the best "
        f"at K = {_TRIED} on mini-LLaVA first. K is each state's own; --autoprune-budget serves "
        "another one. More: vllm-autoprune show NAME"
    )
    print_result(options, records, format_table(head, rows, "<<>><>"), format_paragraphs([about]))
    return 0


_TRIED = 16
"""K at which the evidence in shipped states orders them."""


def _order_to_try(policy: PruningPolicy) -> tuple[int, float, str]:
    """Sort key of `list`: what searches found here, methods as published, others, ablations."""
    state = policy.state
    found = re.search(r"\bsearch\b", state.provenance.found_by) is not None
    kinds = (found, state.name in BASE_POLICIES,
             not state.name.startswith("ablation"))  # fmt: skip
    rows = _read_scores(state)
    accuracy = max((row.accuracy for row in rows if row.budget == _TRIED), default=0.0)
    return (kinds.index(True) if any(kinds) else len(kinds), -accuracy, state.name)


@command(
    "show",
    _STATE,
    argument("--budget", type=int, help="show it at this K instead of its own"),
)
def _show_state(options: argparse.Namespace) -> int:
    """Describe a state in words and as a table."""
    state = load_state(options.state)
    policy = materialize(state, options.budget)
    parts, words = list(_list_parts(state)), _describe_policy(policy)
    reads = ["features", *sorted(policy.needs)]
    provenance = state.provenance.model_dump(mode="json")
    record = {
        "name": state.name,
        "digest": state.digest,
        "budget": _budget_range(policy),
        "core": policy.core,
        "q_e": policy.quota,
        "r_min": policy.r_min,
        "reads": reads,
        "rank_at": state.rank_at,
        "parts": parts,
        "provenance": provenance,
        "words": words,
    }
    rows = []
    for part in parts:
        parameters = (f"{name} = {_format_value(v)}" for name, v in part["parameters"].items())
        rows.append([part["part"], part["atom"], ", ".join(parameters) or "-", part["doc"]])
    origin = [[key, _format_value(v)] for key, v in provenance.items() if v not in ("", None, {})]
    nothing = "No provenance: the state does not say where it comes from or what was measured."
    print_result(
        options,
        record,
        f"{state.name}  (digest {state.digest[:12]})",
        format_paragraphs([" ".join(words), f"Reads {', '.join(reads)}, at {state.rank_at}."]),
        format_table(["part", "atom", "parameters", "what it does"], rows, wrap=WIDTH + 40),
        format_table(["provenance", ""], origin, wrap=WIDTH) if origin else nothing,
    )
    return 0


def _list_parts(state: PruningState) -> Iterator[dict[str, Any]]:
    """Base policies and atoms of a state, with their parameters, in the order of its fields."""
    scoring, constraints, core = state.scoring, state.constraints, state.core
    fields: dict[str, tuple[AtomCall | BasePolicyCall, ...]] = {
        "base policy": (state.base_policy,),
        "source": (state.source.tokens,),
        "prior": state.source.priors,
        "budget": (state.budget,),
        "core": () if core is None else (core.policy,),
        "signal": scoring.signals,
        "kernel": (scoring.kernel,),
        "fusion": (scoring.fusion,),
        "pool": constraints.pool,
        "partition": (constraints.partition,),
        "selector": (constraints.selector,),
        "reassembly": (state.reassembly,),
        "safety": state.safety,
    }
    for part, call in ((part, call) for part, calls in fields.items() for call in calls):
        if isinstance(call, BasePolicyCall):
            name, doc = call.name, BASE_POLICIES[call.name].doc
            parameters = call.params.model_dump(mode="json")
        else:
            name, doc = call.atom, ATOMS.of(call).doc
            parameters = call.model_dump(mode="json", exclude={"atom"})
        if part == "core" and core is not None:
            parameters |= core.model_dump(exclude={"policy"})
        yield {"part": part, "atom": name, "parameters": parameters, "doc": doc}


def _budget_range(policy: PruningPolicy) -> tuple[int, int]:
    """Smallest and largest K of an image."""
    return policy.state.budget.range() if policy.varies else (policy.budget, policy.budget)


def _describe_policy(policy: PruningPolicy) -> list[str]:
    """Sentences that say what a policy keeps, exchanges and reads."""
    state, base, (least, most) = policy.state, policy.base.name, _budget_range(policy)
    count = f"{most}" if least == most else f"{least} to {most}, by its size,"
    words = [f"Keeps {count} visual tokens of every image, starting from those that {base} picks."]
    if state.core is not None and policy.core:
        name = state.core.policy.name
        if policy.core == policy.budget:
            return [f"Keeps {count} visual tokens of every image, all chosen by {name} without the "
                    "question, so all questions on one image share its KV cache."]  # fmt: skip
        share = f"{policy.core}" if least == most else f"{state.core.share:.0%}"
        words.append(
            f"{share} of them, the core, are chosen before by {name}, without the question."
        )
    if policy.refines:
        pools = ", then ".join(call.atom for call in state.constraints.pool)
        signals = sum(call.weight > 0 for call in state.scoring.signals)
        words.append(
            f"At most {policy.quota} of them are exchanged for candidates, so at least "
            f"{policy.r_min} stay. Quality is the {state.scoring.fusion.atom} of {signals} signals;"
            f" candidates come from {pools}."
        )
    else:
        words.append("Nothing is exchanged: the base policy alone chooses.")
    if not policy.reads_instruction:
        reads = "It does not read the instruction, so all questions on one image share its KV cache"
    elif policy.core:
        reads = "Questions on one image share the KV cache of its core alone"
    else:
        reads = "It reads the instruction, so two questions on one image share no KV cache"
    return [*words, f"{reads}."]


@command(
    "diff",
    argument("first", help="file, or name of a shipped state"),
    argument("second", help="file, or name of a shipped state"),
)
def _compare_states(options: argparse.Namespace) -> int:
    """Compare two states field by field."""
    before, after = load_state(options.first), load_state(options.second)
    # With default values written out, which are no difference.
    changes = list_changes(before.document(), after.document())
    verdict = f"digests differ: {before.digest[:12]} and {after.digest[:12]}"
    if before.digest == after.digest:
        verdict = f"same digest {before.digest[:12]}: both keep the same tokens"
    rows = [
        [change.where, "-" if change.kind == "added" else _format_value(change.before),
         "-" if change.kind == "removed" else _format_value(change.after)]
        for change in changes
    ]  # fmt: skip
    table = format_table(["field", options.first, options.second], rows, wrap=WIDTH)
    record = {
        "digests": (before.digest, after.digest),
        "same_behaviour": before.digest == after.digest,
    }
    record |= {"changes": [asdict(change) for change in changes]}
    print_result(options, record, verdict, table if changes else "no field differs")
    return 0


@command(
    "atoms",
    argument("--group", choices=list(ROLES), help="atoms of one group only"),
    argument(
        "--prompt", action="store_true", help="the language as an LLM proposer and the site have it"
    ),
)
def _list_atoms(options: argparse.Namespace) -> int:
    """List the atoms of the language."""
    if options.prompt:
        print(render_language(), end="")
        return 0
    atoms = [ATOMS[name] for name in ATOMS.names(options.group)]
    records = [
        {
            "name": atom.name,
            "group": atom.group,
            "role": atom.role,
            "origin": atom.origin,
            "needs": sorted(atom.needs),
            "doc": atom.doc,
            "parameters": atom.call.model_json_schema()["properties"],
        }
        for atom in atoms
    ]
    rows = [
        [atom.group, atom.name, atom.origin, ", ".join(sorted(atom.needs)) or "-", atom.doc]
        for atom in atoms
    ]
    table = format_table(["group", "atom", "origin", "reads", "what it does"], rows, wrap=160)
    added = sum(atom.origin == "extension" for atom in atoms)
    about = f"{len(atoms) - added} atoms of the paper's language, {added} extensions"
    print_result(options, records, table, about)
    return 0


@command("schema")
def _print_schema(options: argparse.Namespace) -> int:
    """Print the JSON Schema of a state."""
    options.json = True  # whether asked for or not
    print_result(options, PruningState.model_json_schema())
    return 0


@command(
    "materialize",
    _STATE,
    argument("--budget", type=int, metavar="K", help="tokens one image contributes"),
    argument("--backbone", metavar="NAME", help=", ".join(BACKBONE_SHAPES)),
    argument(
        "--instruction-free",
        action="store_true",
        help="read no instruction, so that all questions about an image share KV blocks",
    ),
    argument("--name", help="name of the new state (default: derived from the old one)"),
    argument("-o", "--output", type=Path, metavar="FILE", help="write the new state here"),
)
def _materialize_state(options: argparse.Namespace) -> int:
    """Transfer a state to another budget or backbone, and record what changed."""
    backbone = None if options.backbone is None else find_backbone(options.backbone)
    state, changes = load_state(options.state), tuple[Change, ...]()
    if options.instruction_free:
        state, changes = instruction_free(state)
    state, further = transfer(state, options.budget, backbone, options.name)
    changes += further
    policy = materialize(state, options.budget)
    safety = check_transfer(policy, backbone)
    record = {
        "name": state.name,
        "digest": state.digest,
        "budget": policy.budget,
        "changes": [asdict(change) for change in changes],
        "valid": safety.valid,
        "verdicts": [asdict(verdict) for verdict in safety.verdicts],
        "state": json.loads(state.dumps()),
    }
    rows = [[change.where, _format_value(change.before), _format_value(change.after), change.why]
            for change in changes]  # fmt: skip
    table = format_table(["changed", "before", "after", "why"], rows, wrap=WIDTH + 40)
    verdict = "valid" if safety.valid else "fails; nothing is written"
    blocks = [
        f"{state.name}: K = {policy.budget}, digest {state.digest[:12]}",
        table if changes else "no field changes",
        "\n".join([f"safety check: {verdict}", *_format_verdicts(safety)]),
    ]
    if safety.valid and options.output is not None:
        write_file(options.output, state.dumps())
        blocks.append(f"wrote {options.output}")
    print_result(options, record, *blocks)
    return 0 if safety.valid else 1


def _format_value(value: JsonValue) -> str:
    """A JSON value in one line, strings without quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _format_verdicts(safety: SafetyRecord) -> list[str]:
    return [f"  {'ok  ' if v.ok else 'FAIL'} {v.name}: {v.detail}" for v in safety.verdicts]


@command(
    "validate",
    argument("state", nargs="+", help="file, or name of a shipped state"),
    argument("--budget", type=int, help="check at this K instead of the state's own"),
)
def _validate_states(options: argparse.Namespace) -> int:
    """Check states, run their safety check, warn where resizing images was better.

    One record a state; one that cannot be loaded is reported, never raised.
    """
    records, lines = list[dict[str, Any]](), list[str]()
    for source in options.state:
        record: dict[str, Any] = {"source": source, "valid": False, "budget": options.budget}
        record |= {"digest": None, "problems": [], "verdicts": [], "warnings": []}
        records.append(record)
        try:
            policy = materialize(load_state(source), options.budget)
        except (StateError, BudgetError) as error:
            record["problems"] = [[p.where, p.what, p.fix] for p in error.problems]
            lines.append(str(error))
            continue
        safety, warnings = safety_check(policy), list(_find_losses(policy.state))
        record["valid"], record["budget"] = safety.valid, policy.budget
        record["digest"] = digest = policy.state.digest
        record["verdicts"] = [[v.name, v.ok, v.detail] for v in safety.verdicts]
        record["warnings"] = [[loss.where, loss.what, loss.fix] for loss in warnings]
        verdict = "valid" if safety.valid else "fails its safety check"
        lines.append(f"{source}: {verdict}, K = {policy.budget}, digest {digest[:12]}")
        lines += [*_format_verdicts(safety), *(f"  warn {loss}" for loss in warnings)]
    print_result(options, records, "\n".join(lines))
    return 0 if all(record["valid"] for record in records) else 1


class _Row(BaseModel):
    """Scores of a state at one budget; other fields do not matter here."""

    budget: int | str
    """K, or a share of N such as "N/8" where images differ in size."""
    model: str = ""
    accuracy: float = 0.0
    less_resized: Estimate | None = None


def _read_scores(state: PruningState) -> list[_Row]:
    """The scores in a state's provenance; none where they have another form."""
    try:
        return TypeAdapter(list[_Row]).validate_python(state.provenance.scores.get("rows", []))
    except ValidationError:
        return []


def _find_losses(state: PruningState) -> Iterator[Problem]:
    """Budgets at which resizing beats the state, by the scores in its own provenance."""
    for number, row in enumerate(_read_scores(state)):
        if row.less_resized is not None and row.less_resized.high < 0:
            points, low, high = (-x for x in (row.less_resized.value, row.less_resized.high,
                                              row.less_resized.low))  # fmt: skip
            place = f"{row.budget} on {row.model}" if row.model else f"{row.budget}"
            what = f"resizing beats it at K = {place} by {points:.1f} points ({low:.1f} to "
            fix = "serve smaller images at this K, or another state"
            yield Problem(f"/provenance/scores/rows/{number}", f"{what}{high:.1f})", fix)
