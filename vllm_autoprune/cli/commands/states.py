"""Commands on states and their language: what ships, what a state does, whether it is valid."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from vllm_autoprune.backbones import BACKBONE_SHAPES, find_backbone
from vllm_autoprune.cli.description import (
    ScoreRow,
    budget_range,
    describe_policy,
    format_value,
    list_parts,
    read_scores,
)
from vllm_autoprune.cli.flags import argument, command, read_budget
from vllm_autoprune.cli.output import (
    format_definitions,
    format_paragraphs,
    format_table,
    print_result,
    print_text,
    write_file,
)
from vllm_autoprune.errors import BudgetError, Problem, StateError
from vllm_autoprune.tpdsl.atoms.safety import SafetyRecord
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.loading import DEFAULT_STATE, load_state, shipped_states
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.reference import render_language
from vllm_autoprune.tpdsl.registry import ATOMS, ROLES, Origin
from vllm_autoprune.tpdsl.safety import safety_check
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.transfer import (
    Change,
    check_transfer,
    instruction_free,
    transfer,
)

_STATE = argument("state", help="file, or name of a shipped state")

_BY_DEFAULT = "by default"
_TO_MEASURE = (
    "cen_divprune",
    "pivoted_qr",
    "pivoted_qr-relevance",
    "pivoted_qr-searched",
    "minillava",
    "minillava-split",
    "miniqwen",
)
"""Shipped states that are recommended to users who measure states on their own questions."""

_FOLDED = {
    "ablation-": "ablations",
    "autoprune-": "forms of autoprune for one backbone and K",
}
"""Prefix of the names of states that `list` leaves out -> what these states are."""

_COMPARED = "N/8"
"""K of the recorded accuracy that `list` has."""

_YARDSTICKS = ("mini-LLaVA", "mini-Qwen3-VL", "mini-InternVL", "mini-Gemma")
"""The models of the recorded accuracy of shipped states."""


_Record = dict[str, Any]


class _Entry(NamedTuple):
    """A shipped state as `list` has it."""

    kind: str
    """What the state is, of :data:`_FOLDED`, if `list` leaves it out; empty for the others."""
    order: tuple[bool, bool, str, float, str]
    """Sort key: recommended states, others, states left out; by falling sum of the accuracies on
    all models within each."""
    record: _Record
    row: list[object]


@command(
    "list", argument("--all", action="store_true", help="with those that are left out")
)
def _list_states(options: Namespace) -> int:
    """List the states that ship."""
    entries = sorted(map(_describe_entry, shipped_states()), key=attrgetter("order"))
    rows = [entry.row for entry in entries if options.all or not entry.kind]
    texts = []
    if len(rows) < len(entries):
        counts = Counter(entry.kind for entry in entries if entry.kind)
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        texts.append(
            f"Left out: {kinds}. All {len(entries)}: vllm-autoprune list --all"
        )
    texts.append(
        "First what is recommended (docs/choosing.md) and what is worth measuring; "
        "of each, and of the others, the best on the small models, whose columns are per cent "
        f"right at K = {_COMPARED}. K is each state's own; --autoprune-budget serves another one. "
        "More: vllm-autoprune show NAME"
    )
    head = ["state", "recommended", "K", "reads question", *_YARDSTICKS]
    print_result(
        options,
        [entry.record for entry in entries],
        format_table(head, rows, "<<><>>>>"),
        format_paragraphs(texts),
    )
    return 0


def _describe_entry(name: str) -> _Entry:
    policy = materialize(load_state(name))
    state = policy.state
    budget = str(state.budget.rule())
    exchanges = "all" if policy.quota == policy.budget else policy.quota
    reads: object = policy.reads_instruction
    if reads and policy.core:
        reads = f"{1 - policy.core / policy.budget:.0%} of K"
    accuracy = {
        row.model.partition(" ")[0]: row.accuracy
        for row in read_scores(state)
        if row.budget == _COMPARED
    }
    record = {
        "name": name,
        "base_policy": policy.base.name,
        "budget": budget,
        "accuracy": accuracy,
        "exchanges": exchanges,
        "reads_instruction": policy.reads_instruction,
        "core": policy.core,
        "digest": state.digest,
    }
    recommended = _recommend(state)
    kind = next((kind for start, kind in _FOLDED.items() if name.startswith(start)), "")
    order = (
        recommended != _BY_DEFAULT,
        not recommended,
        kind,
        -sum(accuracy.values()),
        name,
    )
    row: list[object] = [name, recommended or "-", budget, reads]
    for model in _YARDSTICKS:
        row.append(f"{accuracy[model]:.1f}" if model in accuracy else "-")
    return _Entry(kind, order, record, row)


def _recommend(state: PruningState) -> str:
    """When a state is recommended: by default, or if the user measures.

    Returns an empty text for other states, among them those of users, whatever their names.
    """
    is_shipped = state.name in shipped_states()
    if not is_shipped or load_state(state.name).digest != state.digest:
        return ""
    if state.name == DEFAULT_STATE:
        return _BY_DEFAULT
    return "if you measure" if state.name in _TO_MEASURE else ""


@command(
    "show",
    _STATE,
    argument(
        "--budget",
        type=read_budget,
        metavar="K",
        help="show it at this K, or share of N",
    ),
)
def _show_state(options: Namespace) -> int:
    """Describe a state: what it keeps, what was measured, its parts and its origin."""
    state = load_state(options.state)
    policy = materialize(state, options.budget)
    fields = list_parts(policy)
    sentences = describe_policy(policy)
    reads = ["features", *sorted(policy.needs)]
    provenance = state.provenance.model_dump(mode="json")
    records = []
    lines = []
    for field, parts in fields.items():
        for part in parts:
            records.append(
                {
                    "part": field,
                    "atom": part.name,
                    "parameters": part.parameters,
                    "doc": part.doc,
                }
            )
            if part.decides:
                lines.append((field, part.format(part.changed)))
                lines.append(("", part.doc))
    record = {
        "name": state.name,
        "digest": state.digest,
        "budget": budget_range(policy),
        "core": policy.core,
        "q_e": policy.quota,
        "r_min": policy.r_min,
        "reads": reads,
        "rank_at": state.rank_at,
        "parts": records,
        "provenance": provenance,
        "words": sentences,
    }
    title = state.name
    if recommended := _recommend(state):
        title += f", recommended {recommended}"
    summary = [" ".join(sentences), f"Reads {', '.join(reads)}, at {state.rank_at}."]
    blocks = [f"{title}  (digest {state.digest[:12]})", format_paragraphs(summary)]
    scores = read_scores(state)
    if scores:
        blocks.append(_format_scores(scores))
    origin = [
        (key.replace("_", " "), format_value(value))
        for key, value in provenance.items()
        if value not in ("", None, {})
        and key != "chosen_by"
        and not (scores and key == "scores")
    ]
    if images := state.provenance.chosen_by.split():
        count = f"questions about {len(images):,} images, which eval leaves out"
        origin.append(("chosen by", count))
    nothing = "No provenance: the state does not say where it comes from or what was measured."
    blocks += [
        format_definitions(lines),
        "Parts that decide nothing and parameters at their defaults are left to --json.",
        format_definitions(origin) if origin else nothing,
    ]
    print_result(options, record, *blocks)
    return 0


def _format_scores(scores: Sequence[ScoreRow]) -> str:
    """Table of recorded scores, with a column for each comparison that was made."""
    head = ["measured on", "K", "% right"]
    rows = [[row.model, row.budget, f"{row.accuracy:.1f}"] for row in scores]
    for title, gains in (
        ("less images resized to K tokens", [row.less_resized for row in scores]),
        ("less base policy alone", [row.less_base for row in scores]),
    ):
        if not any(gains):
            continue
        head.append(title)
        for row, gain in zip(rows, gains, strict=True):
            text = "-"
            if gain:
                text = f"{gain.value:+.1f} ({gain.low:+.1f} to {gain.high:+.1f})"
            row.append(text)
    return format_table(head, rows, "<>>")


_ORIGINS: dict[Origin, str] = {
    "printed": "named in the paper",
    "listed": "this project's",
    "extension": "extension",
}
"""Origin of an atom, in words."""


@command(
    "atoms",
    argument("--group", choices=list(ROLES), help="atoms of one group only"),
    argument(
        "--prompt",
        action="store_true",
        help="the language as an LLM proposer and the site have it",
    ),
    argument("--schema", action="store_true", help="the JSON Schema of a state"),
)
def _list_atoms(options: Namespace) -> int:
    """List the atoms of the language, or print its JSON Schema."""
    if options.prompt:
        print_text(render_language(), end="")
        return 0
    if options.schema:
        options.json = True  # a schema is JSON even without --json
        print_result(options, PruningState.model_json_schema())
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
        [
            atom.group,
            atom.name,
            _ORIGINS[atom.origin],
            ", ".join(sorted(atom.needs)) or "-",
            atom.doc,
        ]
        for atom in atoms
    ]
    table = format_table(
        ["group", "atom", "origin", "reads", "what it does"], rows, wrap=True
    )
    counts = Counter(atom.origin for atom in atoms)
    about = (
        f"{counts['printed'] + counts['listed']} of the paper's 131 atoms, of which it names "
        f"{counts['printed']}; names and definitions of the other {counts['listed']} are this "
        f"project's own, as are {counts['extension']} extensions."
    )
    print_result(options, records, table, format_paragraphs([about]))
    return 0


@command(
    "materialize",
    _STATE,
    argument(
        "--budget",
        type=read_budget,
        metavar="K",
        help="tokens of one image: 64, or 1/8",
    ),
    argument("--backbone", metavar="NAME", help=", ".join(BACKBONE_SHAPES)),
    argument(
        "--instruction-free",
        action="store_true",
        help="read no instruction, so that all questions about an image share KV blocks",
    ),
    argument(
        "--name", help="name of the new state (default: derived from the old one)"
    ),
    argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the new state here"
    ),
)
def _materialize_state(options: Namespace) -> int:
    """Transfer a state to another budget or backbone, and record what changed."""
    backbone = None if options.backbone is None else find_backbone(options.backbone)
    state = load_state(options.state)
    changes = tuple[Change, ...]()
    if options.instruction_free:
        state, changes = instruction_free(state)
    state, further = transfer(state, options.budget, backbone, options.name)
    changes += further
    policy = materialize(state)
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
    rows = [
        [
            change.where,
            format_value(change.before),
            format_value(change.after),
            change.why,
        ]
        for change in changes
    ]
    table = format_table(["changed", "before", "after", "why"], rows, wrap=True)
    verdict = "valid" if safety.valid else "fails; nothing is written"
    blocks = [
        f"{state.name}: K = {state.budget.rule()}, digest {state.digest[:12]}",
        table if changes else "no field changes",
        "\n".join([f"safety check: {verdict}", *_format_verdicts(safety)]),
    ]
    if safety.valid and options.output is not None:
        write_file(options.output, state.dumps())
        blocks.append(f"wrote {options.output}")
    print_result(options, record, *blocks)
    return 0 if safety.valid else 1


def _format_verdicts(safety: SafetyRecord) -> list[str]:
    return [
        f"  {'ok  ' if verdict.ok else 'FAIL'} {verdict.name}: {verdict.detail}"
        for verdict in safety.verdicts
    ]


@command(
    "validate",
    argument("state", nargs="+", help="file, or name of a shipped state"),
    argument(
        "--budget", type=read_budget, metavar="K", help="check at this K, or share of N"
    ),
)
def _validate_states(options: Namespace) -> int:
    """Check states, run their safety check, warn where resizing images was better.

    One record a state; one that cannot be loaded is reported, never raised.
    """
    records = []
    lines = []
    for source in options.state:
        record, text = _validate_state(source, options.budget)
        records.append(record)
        lines.extend(text)
    print_result(options, records, "\n".join(lines))
    return 0 if all(record["valid"] for record in records) else 1


def _validate_state(
    source: str, budget: BudgetCall | None
) -> tuple[_Record, list[str]]:
    """Validate one state; returns its record, and its lines of text."""
    record: _Record = {
        "source": source,
        "valid": False,
        "budget": budget and budget.rule(),
        "digest": None,
        "problems": [],
        "verdicts": [],
        "warnings": [],
    }
    try:
        policy = materialize(load_state(source), budget)
    except (StateError, BudgetError) as error:
        record["problems"] = [[p.where, p.what, p.fix] for p in error.problems]
        return record, [str(error)]
    safety = safety_check(policy)
    warnings = _find_losses(read_scores(policy.state))
    digest = policy.state.digest
    record |= {
        "valid": safety.valid,
        "budget": policy.budget,
        "digest": digest,
        "verdicts": [[v.name, v.ok, v.detail] for v in safety.verdicts],
        "warnings": [[loss.where, loss.what, loss.fix] for loss in warnings],
    }
    verdict = "valid" if safety.valid else "fails its safety check"
    rule = policy.by_size.rule() if policy.by_size else policy.budget
    return record, [
        f"{source}: {verdict}, K = {rule}, digest {digest[:12]}",
        *_format_verdicts(safety),
        *(f"  warn {loss}" for loss in warnings),
    ]


def _find_losses(scores: Sequence[ScoreRow]) -> list[Problem]:
    """A problem for each row in which images resized to K tokens gave higher accuracy."""
    losses = []
    for number, row in enumerate(scores):
        gain = row.less_resized
        if gain is None or gain.high >= 0:
            continue
        setting = f"{row.budget} on {row.model}" if row.model else f"{row.budget}"
        what = (
            f"resizing beats it at K = {setting} by {-gain.value:.1f} points "
            f"({-gain.high:.1f} to {-gain.low:.1f})"
        )
        fix = "serve smaller images at this K, or another state"
        losses.append(Problem(f"/provenance/scores/rows/{number}", what, fix))
    return losses
