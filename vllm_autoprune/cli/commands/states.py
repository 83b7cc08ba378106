"""Commands on states and their language: what ships, what a state does, whether it is valid."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError

from vllm_autoprune.backbones import BACKBONE_SHAPES, find_backbone
from vllm_autoprune.cli.flags import argument, command, read_budget
from vllm_autoprune.cli.output import (
    format_definitions,
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

_RECOMMENDED = {
    "LLaVA": "cen_divprune",
    "Qwen": "cen_divprune",
    "others": "cen_divprune",
}
"""Backbone family -> state to begin with, by the rule of docs/choosing.md, "Default states"."""

_FOLDED = {
    "ablation-": "ablations",
    "autoprune-": "forms of autoprune for one backbone and K",
}
"""How the names begin that `list` leaves out."""

_TRIED = 16
"""K at which the evidence in shipped states orders them."""


@command(
    "list", argument("--all", action="store_true", help="with those that are left out")
)
def _list_states(options: argparse.Namespace) -> int:
    """List the states that ship."""
    entries = list[
        tuple[tuple[bool, bool, str, float, str], dict[str, Any], list[object]]
    ]()
    for name in shipped_states():
        policy = materialize(load_state(name))
        state, recommended = policy.state, _recommend(policy.state)
        record = {
            "name": name,
            "base_policy": policy.base.name,
            "budget": f"{state.budget.rule()}",
            "exchanges": "all" if policy.quota == policy.budget else policy.quota,
            "reads_instruction": policy.reads_instruction,
            "core": policy.core,
            "digest": state.digest,
        }
        reads: object = policy.reads_instruction
        if reads and policy.core:
            reads = f"{1 - policy.core / policy.budget:.0%} of K"
        row = [name, recommended or "-", record["budget"], reads]
        row += [record["exchanges"], record["base_policy"]]
        # Recommended ones, others, those left out; of each the best first.
        kind = next(
            (kind for start, kind in _FOLDED.items() if name.startswith(start)), ""
        )
        scores = [row.accuracy for row in _read_scores(state) if row.budget == _TRIED]
        order = (
            recommended[:2] != "on",
            not recommended,
            kind,
            -max(scores, default=0.0),
            name,
        )
        entries.append((order, record, row))
    entries.sort(key=itemgetter(0))
    rows = [row for order, _, row in entries if options.all or not order[2]]
    hidden = Counter(
        order[2] for order, _, _ in entries if order[2] and not options.all
    )
    texts = [
        "First what is recommended for a backbone (docs/choosing.md) and what searches found; of "
        f"each, and of the others, the best at K = {_TRIED} on mini-LLaVA. K is each state's own; "
        "--autoprune-budget serves another one. More: vllm-autoprune show NAME"
    ]
    if hidden:
        kinds = ", ".join(f"{count} {kind}" for kind, count in hidden.items())
        texts.insert(
            0, f"Left out: {kinds}. All {len(entries)}: vllm-autoprune list --all"
        )
    head = ["state", "recommended", "K", "reads question", "exchanges", "base policy"]
    records = [record for _, record, _ in entries]
    print_result(
        options, records, format_table(head, rows, "<<><>"), format_paragraphs(texts)
    )
    return 0


def _recommend(state: PruningState) -> str:
    """Where a state is recommended, if anywhere."""
    if families := [
        family for family, best in _RECOMMENDED.items() if state.name == best
    ]:
        return f"on {', '.join(families)}"
    return (
        "if you measure" if re.search(r"\bsearch\b", state.provenance.found_by) else ""
    )


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
def _show_state(options: argparse.Namespace) -> int:
    """Describe a state: what it keeps, what was measured, its parts and its origin."""
    state = load_state(options.state)
    policy = materialize(state, options.budget)
    fields = _list_parts(policy)
    words = _describe_policy(policy)
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
        "parts": [
            {
                "part": field,
                "atom": part.name,
                "parameters": part.parameters,
                "doc": part.doc,
            }
            for field, parts in fields.items()
            for part in parts
        ],
        "provenance": provenance,
        "words": words,
    }
    recommended = _recommend(state)
    title = f"{state.name}, recommended {recommended}" if recommended else state.name
    sentences = " ".join(words), f"Reads {', '.join(reads)}, at {state.rank_at}."
    blocks = [f"{title}  (digest {state.digest[:12]})", format_paragraphs(sentences)]
    if scores := _read_scores(state):
        rows = [[row.model, row.budget, f"{row.accuracy:.1f}"] for row in scores]
        head = ["measured on", "K", "% right"]
        for title, gains in (
            ("less images resized to K tokens", [row.less_resized for row in scores]),
            ("less base policy alone", [row.less_base for row in scores]),
        ):
            head += [title] * any(gains)
            for row, gain in zip(rows, gains, strict=True) if any(gains) else ():
                text = "{value:+.1f} ({low:+.1f} to {high:+.1f})"
                row.append(text.format(**asdict(gain)) if gain else "-")
        blocks.append(format_table(head, rows, "<>>"))
    lines = list[tuple[str, str]]()
    for field, parts in fields.items():
        for part in parts:
            if part.decides:
                lines += [(field, part.format(part.changed)), ("", part.doc)]
    defaults = (
        "Parts that decide nothing and parameters at their defaults are left to --json."
    )
    blocks += [format_definitions(lines), defaults]
    origin = [
        (key.replace("_", " "), _format_value(text))
        for key, text in provenance.items()
        if text not in ("", None, {}) and not (scores and key == "scores")
    ]
    nothing = "No provenance: the state does not say where it comes from or what was measured."
    print_result(
        options, record, *blocks, format_definitions(origin) if origin else nothing
    )
    return 0


class _Part(NamedTuple):
    """A base policy or an atom of a state, and what it does."""

    name: str
    doc: str
    parameters: dict[str, Any]
    changed: Collection[str]
    """Names of the parameters that are not at their defaults."""
    decides: bool
    """Whether it has an effect in its state."""

    def format(self, names: Collection[str]) -> str:
        """Its name, and some of its parameters."""
        values = [
            f"{n}={_format_value(v)}" for n, v in self.parameters.items() if n in names
        ]
        return f"{self.name}: {', '.join(values)}" if values else self.name


def _list_parts(policy: PruningPolicy) -> dict[str, list[_Part]]:
    """Base policies and atoms of a state by the field that they are in."""
    state = policy.state
    scoring = state.scoring
    constraints = state.constraints
    core = state.core
    signals = sorted(scoring.signals, key=lambda signal: -signal.weight)
    fields: dict[str, Sequence[AtomCall | BasePolicyCall]] = {
        "base policy": (state.base_policy,),
        "source": (state.source.tokens,),
        "prior": state.source.priors,
        "budget": (state.budget,),
        "core": () if core is None else (core.policy,),
        "signal": signals,
        "kernel": (scoring.kernel,),
        "fusion": (scoring.fusion,),
        "pool": constraints.pool,
        "partition": (constraints.partition,),
        "selector": (constraints.selector,),
        "reassembly": (state.reassembly,),
        "safety": state.safety,
    }
    idle = {
        "base policy": policy.core == policy.budget,
        **dict.fromkeys(
            ("source", "prior", "signal", "fusion"), not policy.reads_quality
        ),
        **dict.fromkeys(("kernel", "pool", "selector"), not policy.refines),
        "partition": not policy.refines
        or "cell_cap" not in constraints.selector.parameters(),
        "safety": True,  # checked whether listed or not, but for the fallback
    }

    def read_part(field: str, call: AtomCall | BasePolicyCall) -> _Part:
        decides = not idle.get(field)
        if isinstance(call, BasePolicyCall):
            settings: BaseModel = call.params
            name, doc = call.name, BASE_POLICIES[call.name].doc
        else:
            name = call.atom
            doc = ATOMS.of(call).doc
            settings = call
            decides &= not call.idle or state.orders_by_quality
        parameters = settings.model_dump(mode="json", exclude={"atom"})
        changed = settings.model_dump(exclude={"atom"}, exclude_defaults=True)
        if field == "core" and core is not None:
            parameters |= core.model_dump(exclude={"policy"})
            changed |= core.model_dump(exclude={"policy"}, exclude_defaults=True)
        # A signal of weight 0 is not read.
        return _Part(
            name, doc, parameters, changed, decides and parameters.get("weight") != 0
        )

    return {
        field: [read_part(field, c) for c in calls] for field, calls in fields.items()
    }


def _budget_range(policy: PruningPolicy) -> tuple[int, int]:
    """Smallest and largest K of an image."""
    return policy.by_size.range() if policy.by_size else (policy.budget, policy.budget)


def _describe_policy(policy: PruningPolicy) -> list[str]:
    """Sentences that say what a policy keeps, exchanges and reads."""
    state = policy.state
    base = policy.base.name
    (least, most) = _budget_range(policy)
    count = f"{policy.by_size.rule()} of the" if policy.by_size else f"{most}"
    words = [
        f"Keeps {count} visual tokens of every image, starting from those that {base} picks."
    ]
    if state.core is not None and policy.core:
        name = state.core.policy.name
        if policy.core == policy.budget:
            return [
                f"Keeps {count} visual tokens of every image, all chosen by {name} without the "
                "question, so all questions on one image share its KV cache."
            ]
        share = f"{policy.core}" if least == most else f"{state.core.share:.0%}"
        words.append(
            f"{share} of them, the core, are chosen before by {name}, without the question."
        )
    if state.cells is not None:
        words.append(
            f"Cells are dropped before the vision tower by the rule {state.cells}."
        )
    if state.frames is not None:
        rule = f"{state.frames.tokens.rule()}, spread over its frames: {state.frames.budget}"
        words.append(f"Of a video it keeps {rule}.")
    if policy.refines:
        exchanged = f"At most {policy.quota}" if policy.quota < policy.budget else "All"
        words.append(
            f"{exchanged} of them may be exchanged for candidates of higher quality."
        )
    else:
        merges = not state.reassembly.idle
        chooses = "chooses, and what it drops is merged into what it keeps" * merges
        words.append(
            f"Nothing is exchanged: the base policy {chooses or 'alone chooses'}."
        )
    if not policy.reads_instruction:
        reads = "It does not read the instruction, so all questions on one image share its KV cache"
    elif policy.core:
        reads = "Questions on one image share the KV cache of its core alone"
    else:
        reads = (
            "It reads the instruction, so two questions on one image share no KV cache"
        )
    return [*words, f"{reads}."]


@command(
    "diff",
    argument("first", help="file, or name of a shipped state"),
    argument("second", help="file, or name of a shipped state"),
)
def _compare_states(options: argparse.Namespace) -> int:
    """Compare two states part by part, and what was measured of both."""
    before = load_state(options.first)
    after = load_state(options.second)
    # With default values written out, which are no difference.
    changes = list_changes(before.document(), after.document())
    verdict = f"digests differ: {before.digest[:12]} and {after.digest[:12]}"
    if before.digest == after.digest:
        verdict = f"same digest {before.digest[:12]}: both keep the same tokens"
    record = {
        "digests": (before.digest, after.digest),
        "same_behaviour": before.digest == after.digest,
        "changes": [asdict(change) for change in changes],
    }
    rows = []
    (fields, others) = (_list_parts(materialize(state)) for state in (before, after))
    for field, parts in fields.items():
        olds, news = (
            [part for part in side if part.decides] for side in (parts, others[field])
        )
        # By name, where not each of both states has exactly one.
        names = dict.fromkeys(part.name for part in (*olds, *news))
        sides = (
            ([p for p in side if p.name == name] for side in (olds, news))
            for name in names
        )
        pairs = [pair for old, new in sides for pair in zip_longest(old, new)]
        for old, new in (
            zip(olds, news, strict=True) if len(olds) == len(news) == 1 else pairs
        ):
            cells = [part.format(part.changed) if part else "-" for part in (old, new)]
            if old and new and old.name == new.name:
                changed = old.parameters.keys() | new.parameters.keys()
                changed = {
                    n for n in changed if old.parameters.get(n) != new.parameters.get(n)
                }
                cells = [old.format(changed), new.format(changed)] if changed else []
            rows += [[field, *cells]] if cells else []
    if before.rank_at != after.rank_at:
        rows.append(["ranks at", before.rank_at, after.rank_at])
    if before.cells != after.cells:
        rows.append(["cells", str(before.cells or "none"), str(after.cells or "none")])
    if before.frames != after.frames:
        rows.append(
            ["frames", *(str(state.frames or "none") for state in (before, after))]
        )
    right = [
        {
            f"{row.model.partition(' ')[0]}, K = {row.budget}": f"{row.accuracy:.1f} % right"
            for row in _read_scores(state)
        }
        for state in (before, after)
    ]
    rows += [
        [measured, score, right[1][measured]]
        for measured, score in right[0].items()
        if right[1].get(measured, score) != score
    ]
    text = "no part that decides differs: see --json" if changes else "no field differs"
    if rows:
        text = format_table(["", options.first, options.second], rows, wrap=True)
    print_result(options, record, verdict, text)
    return 0


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
def _list_atoms(options: argparse.Namespace) -> int:
    """List the atoms of the language, or print its JSON Schema."""
    if options.prompt:
        print(render_language(), end="")
        return 0
    if options.schema:
        options.json = True  # whether asked for or not
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
            atom.origin,
            ", ".join(sorted(atom.needs)) or "-",
            atom.doc,
        ]
        for atom in atoms
    ]
    table = format_table(
        ["group", "atom", "origin", "reads", "what it does"], rows, wrap=True
    )
    added = sum(atom.origin == "extension" for atom in atoms)
    about = f"{len(atoms) - added} atoms of the paper's language, {added} extensions"
    print_result(options, records, table, about)
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
def _materialize_state(options: argparse.Namespace) -> int:
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
            _format_value(change.before),
            _format_value(change.after),
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


def _format_value(value: JsonValue) -> str:
    """A JSON value in one line, strings without quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _format_verdicts(safety: SafetyRecord) -> list[str]:
    return [
        f"  {'ok  ' if v.ok else 'FAIL'} {v.name}: {v.detail}" for v in safety.verdicts
    ]


@command(
    "validate",
    argument("state", nargs="+", help="file, or name of a shipped state"),
    argument(
        "--budget", type=read_budget, metavar="K", help="check at this K, or share of N"
    ),
)
def _validate_states(options: argparse.Namespace) -> int:
    """Check states, run their safety check, warn where resizing images was better.

    One record a state; one that cannot be loaded is reported, never raised.
    """
    records = list[dict[str, Any]]()
    lines = list[str]()
    for source in options.state:
        budget = options.budget and options.budget.rule()
        record: dict[str, Any] = {"source": source, "valid": False, "budget": budget}
        record |= {"digest": None, "problems": [], "verdicts": [], "warnings": []}
        records.append(record)
        try:
            policy = materialize(load_state(source), options.budget)
        except (StateError, BudgetError) as error:
            record["problems"] = [[p.where, p.what, p.fix] for p in error.problems]
            lines.append(str(error))
            continue
        safety = safety_check(policy)
        warnings = list[Problem]()
        for number, row in enumerate(_read_scores(policy.state)):
            if (less := row.less_resized) is not None and less.high < 0:
                place = f"{row.budget} on {row.model}" if row.model else f"{row.budget}"
                what = f"resizing beats it at K = {place} by {-less.value:.1f} points "
                what += f"({-less.high:.1f} to {-less.low:.1f})"
                fix = "serve smaller images at this K, or another state"
                warnings.append(Problem(f"/provenance/scores/rows/{number}", what, fix))
        record["valid"], record["budget"] = safety.valid, policy.budget
        record["digest"] = digest = policy.state.digest
        record["verdicts"] = [[v.name, v.ok, v.detail] for v in safety.verdicts]
        record["warnings"] = [[loss.where, loss.what, loss.fix] for loss in warnings]
        verdict = "valid" if safety.valid else "fails its safety check"
        rule = (policy.by_size and policy.by_size.rule()) or policy.budget
        lines.append(f"{source}: {verdict}, K = {rule}, digest {digest[:12]}")
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
    less_base: Estimate | None = None


def _read_scores(state: PruningState) -> list[_Row]:
    """The scores in a state's provenance; none where they have another form.

    Those of a search are means over its budgets.
    """
    scores: dict[str, Any] = state.provenance.scores
    try:
        rows = [
            {"model": scores.get("model", ""), **row} for row in scores.get("rows", [])
        ]
        for split in ("validation", "test") if "search_objective" in scores else ():
            gain = {
                name: 100 * figure
                for name, figure in scores[split]["accuracy_gain"].items()
            }
            accuracy = 100 * scores[split]["accuracy"]
            row = {
                "model": f"{split} split of the search",
                "budget": state.budget.rule(),
            }
            rows.append({**row, "accuracy": accuracy, "less_base": gain})
        return TypeAdapter(list[_Row]).validate_python(rows)
    except (TypeError, KeyError, AttributeError, ValidationError):
        return []
