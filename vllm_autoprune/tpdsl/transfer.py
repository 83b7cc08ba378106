"""Adapt states to another budget or backbone, or to questions that share an image.

Every change is recorded, with its JSON pointer and reason. In a transfer the searched structure
stays the same: base policy, signals and weights, pool and quota. Only fields that depend on the
budget or the backbone change (the paper's cross-budget and cross-backbone transfer), together with
the name and the provenance. Items of a list are matched by their ``atom``, or by their own value if
that is a string.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import JsonValue

from vllm_autoprune.backbones import BackboneShape
from vllm_autoprune.errors import Problem, StateError
from vllm_autoprune.tpdsl.atoms.safety import SafetyRecord
from vllm_autoprune.tpdsl.atoms.signals import Relevance
from vllm_autoprune.tpdsl.atoms.source import FIXED_BUDGETS, BudgetCall, ViewCall
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, INSTRUCTION_NEEDS
from vllm_autoprune.tpdsl.loading import child_pointer
from vllm_autoprune.tpdsl.materialize import PruningPolicy, materialize
from vllm_autoprune.tpdsl.registry import ATOMS, default_call
from vllm_autoprune.tpdsl.safety import (
    MAX_PROBED_BUDGET,
    safety_check,
    synthetic_probes,
)
from vllm_autoprune.tpdsl.state import PruningState

Kind = Literal["changed", "added", "removed", "reordered"]


@dataclass(frozen=True, slots=True)
class Change:
    """One difference at ``where`` in the first document, or in the second for an added field.

    ``before`` is None for an added field, and ``after`` for a removed one; ``why`` is the reason,
    if one is known.
    """

    where: str
    kind: Kind
    before: JsonValue
    after: JsonValue
    why: str = ""


def list_changes(
    before: JsonValue, after: JsonValue, where: str = ""
) -> tuple[Change, ...]:
    """All differences between two documents, in the order of the first document.

    Items of lists with the same name are compared with each other, whatever their positions.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        old: dict[Any, Any] = {key: key for key in before}
        new: dict[Any, Any] = {key: key for key in after}
    elif isinstance(before, list) and isinstance(after, list):
        old = _index_by_name(before)
        new = _index_by_name(after)
    elif type(before) is type(after) and before == after:
        return ()
    else:
        return (Change(where, "changed", before, after),)
    items: tuple[Any, Any] = (before, after)
    changes: list[Change] = []
    for name in dict.fromkeys((*old, *new)):
        if name not in new:
            below = child_pointer(where, old[name])
            changes.append(Change(below, "removed", items[0][old[name]], None))
        elif name not in old:
            below = child_pointer(where, new[name])
            changes.append(Change(below, "added", None, items[1][new[name]]))
        else:
            below = child_pointer(where, old[name])
            changes += list_changes(items[0][old[name]], items[1][new[name]], below)
    order = [name for name in old if name in new]
    reordered = [name for name in new if name in old]
    if isinstance(before, list) and order != reordered:
        was: JsonValue = [name for name, _ in order]
        now: JsonValue = [name for name, _ in reordered]
        changes.append(Change(where, "reordered", was, now))
    return tuple(changes)


def _index_by_name(items: Sequence[JsonValue]) -> dict[tuple[str, int], int]:
    """(name, occurrence of that name) -> index of the item in ``items``."""
    seen: Counter[str] = Counter()
    indices: dict[tuple[str, int], int] = {}
    for index, item in enumerate(items):
        atom = item.get("atom") if isinstance(item, dict) else item
        name = atom if isinstance(atom, str) else ""
        indices[name, seen[name]] = index
        seen[name] += 1
    return indices


NEAREST = {
    "cdpruner": ("divprune", "diversity without conditioning on relevance"),
    "dart": ("divprune", "both keep tokens that are dissimilar to each other"),
    "trim": (
        "visionzip",
        "saliency in the vision tower in place of relevance to the text",
    ),
    "fastv": (
        "visionzip",
        "attention of the vision tower in place of the language model's",
    ),
    "pyramiddrop": (
        "visionzip",
        "attention of the vision tower in place of the language model's",
    ),
    "sparsevlm": (
        "visionzip",
        "attention of the vision tower in place of the language model's",
    ),
}
"""Base policy that always reads the instruction -> the most similar one that does not, and why."""


def instruction_free(
    state: PruningState, name: str | None = None
) -> tuple[PruningState, tuple[Change, ...]]:
    """Variant with the same budget, pool, quota and reassembly that reads no instruction.

    Returns the variant and every field in which it differs. Signals that read the instruction are
    dropped; the others keep their weights, because only the ratios matter. A core is dropped too:
    the variant shares all KV blocks between questions anyway, and its other parts choose better
    among K tokens than among K - K_c. A state that is all core keeps it. Raises
    :class:`StateError` if a part that reads the instruction has no substitute.
    """
    after = state.document()
    why = {"/name": "distinguishes the variant from the original"}
    if state.core is not None and state.core.share < 1:
        del after["core"]
        why["/core"] = "without the instruction, questions share all KV blocks anyway"
    call = state.base_policy
    policy = BASE_POLICIES[call.name]
    if policy.needs_of(call.params) & INSTRUCTION_NEEDS:
        if policy.core is None:
            nearest, why["/base_policy"] = NEAREST[call.name]
            after["base_policy"] = {"name": nearest, "params": {}}
        else:
            params: JsonValue = policy.question_free_params(call.params).model_dump(
                mode="json"
            )
            after["base_policy"] = {"name": call.name, "params": params}
            why["/base_policy"] = "the same policy in its form that reads no question"
    scoring = after["scoring"]
    assert isinstance(scoring, dict)
    signals: list[JsonValue] = [
        signal.model_dump(mode="json")
        for signal in state.scoring.signals
        if not ATOMS.of(signal).needs_of(signal) & INSTRUCTION_NEEDS
    ]
    # A state that scored by relevance alone then scores by attention in the vision tower.
    scoring["signals"] = signals or [{"atom": "attention_proxy_saliency"}]
    why["/scoring/signals"] = "reads the instruction"
    after["name"] = name or f"{state.name}-instruction-free"[-128:]
    after["provenance"] = {
        "found_by": state.provenance.found_by,
        "chosen_by": state.provenance.chosen_by,
        "notes": f"Instruction-free variant of {state.name} ({state.digest[:12]}).",
    }
    why["/provenance"] = "scores of the original state do not apply to the variant"
    variant = PruningState.model_validate(after)
    if variant.needs(exchange=True) & INSTRUCTION_NEEDS:
        parts = {
            "/constraints/selector": variant.constraints.selector,
            "/reassembly": variant.reassembly,
        }
        readers = [
            Problem(
                where,
                f"{part.atom!r} reads the instruction",
                "choose an atom that does not",
            )
            for where, part in parts.items()
            if ATOMS.of(part).needs_of(part) & INSTRUCTION_NEEDS
        ]
        unnamed = Problem(
            "", "a part of the state reads the instruction", "remove that part"
        )
        raise StateError(
            f"instruction-free variant of state {state.name}", readers or [unnamed]
        )
    return variant, _explain(state, variant, why)


def _explain(
    original: PruningState, adapted: PruningState, why: Mapping[str, str]
) -> tuple[Change, ...]:
    """Every difference, with the reason for the first pointer in ``why`` that is its prefix."""
    changes = []
    for change in list_changes(original.document(), adapted.document()):
        reasons = (
            reason for start, reason in why.items() if change.where.startswith(start)
        )
        changes.append(replace(change, why=next(reasons, "")))
    return tuple(changes)


_SPACES = {
    "clip": "CLIP's joint space",
    "language": "the language model's embedding space",
}


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A state under transfer: the new document, and a reason for each changed pointer."""

    state: PruningState
    document: dict[str, Any]
    why: dict[str, str]

    def fit_budget(self, budget: BudgetCall) -> None:
        """Write the budget, and r_min = K - q_e if the state sets r_min."""
        limit = self.state.budget.limit
        selector = self.state.constraints.selector
        minimum, maximum = budget.range()
        fixed = minimum == maximum
        self.why["/budget"] = f"K = {budget.rule()}"
        self.document["budget"] = {**budget.model_dump(mode="json"), "limit": limit}
        if fixed and maximum in FIXED_BUDGETS:
            self.document["budget"] = {
                "limit": limit,
                "atom": f"fixed_budget@{maximum}",
            }
        elif fixed:
            self.why["/budget"] += (
                ", which has no atom: a ratio budget with equal floor and ceiling"
            )
        if selector.explicit_r_min is not None:
            _, r_min = selector.model_copy(update={"r_min": None}).bounds(maximum)
            self.why["/constraints/selector/r_min"] = f"r_min = K - q_e = {r_min}"
            # The grammar allows at most 640. Null means K - q_e, which has no such bound.
            written = r_min if fixed and r_min <= 640 else None
            self.document["constraints"]["selector"]["r_min"] = written

    def fit_backbone(self, backbone: BackboneShape) -> None:
        """Remove what the backbone does not have, and adopt the sign of its relevance."""
        state = self.state
        reads_tower = state.source.tokens.atom == "vision_tokens@vision_tower"
        if reads_tower and not backbone.tower_rows:
            view = default_call(ViewCall, "vision_tokens@post_projector")
            self.document["source"]["tokens"] = view.model_dump(mode="json")
            self.why["/source/tokens"] = (
                f"the vision tower of {backbone.name} does not have one row per visual token"
            )
        if state.rank_at == "merger_in" and not backbone.merger:
            self.document["rank_at"] = "merger_out"
            self.why["/rank_at"] = (
                f"{backbone.name} has no patch merger to rank tokens before"
            )
        if state.cells is not None and not backbone.merger:
            self.document["cells"] = None
            self.why["/cells"] = (
                f"{backbone.name} has no patch merger, and encodes whole images"
            )
        if state.tower is not None and not backbone.merger:
            self.document["tower"] = None
            self.why["/tower"] = (
                f"the vision tower of {backbone.name} passes all cells through all layers"
            )
        self.why["/scoring"] = (
            f"relevance on {backbone.name} is measured in {_SPACES[backbone.relevance]}"
        )
        for index, signal in enumerate(state.scoring.signals):
            if isinstance(signal, Relevance) and signal.sign != "auto":
                self.document["scoring"]["signals"][index]["sign"] = backbone.sign

    def describe(self, name: str, target: str) -> None:
        """Write the name, and a provenance without scores."""
        state = self.state
        self.document["name"] = name
        self.why["/name"] = "distinguishes the two states"
        origin = (
            f"Re-materialized from {state.name} ({state.digest[:12]}) for {target}."
        )
        notes = f"{state.provenance.notes} {origin}".strip()
        self.document["provenance"] |= {
            "evaluated_on": "",
            "scores": {},
            "notes": notes,
        }
        self.why["/provenance"] = (
            f"what was measured before the transfer does not hold for {target}"
        )


def transfer(
    state: PruningState,
    budget: int | BudgetCall | None = None,
    backbone: BackboneShape | None = None,
    name: str | None = None,
) -> tuple[PruningState, tuple[Change, ...]]:
    """Transfer a state to a budget (default: unchanged) and a backbone (default: any).

    Returns the state with every change. Raises :class:`BudgetError` if the state does not allow K.
    """
    new = _Transfer(state, state.document(), {})
    call = state.budget if budget is None else BudgetCall.parse(budget)
    rule = call.rule()
    target = f"K = {rule}"
    suffix = f"-k{rule}"
    if rule != state.budget.rule():
        new.fit_budget(call)
    if backbone is not None:
        new.fit_backbone(backbone)
        target += f" on {backbone.name}"
        suffix = f"-{backbone.name}{suffix}"
    if new.why or name is not None:
        if name is None:
            name = _add_suffix(state.name, suffix)
        new.describe(name, target)
    transferred = PruningState.model_validate(new.document)
    materialize(transferred)  # raises BudgetError
    return transferred, _explain(state, transferred, new.why)


def _add_suffix(name: str, suffix: str) -> str:
    """Name of at most 128 characters: autoprune-k32 becomes autoprune-llava-next-7b-k160."""
    # Replace the characters of a path or a share: 1/8 and 1/8:64-640 give k1-8 and k1-8-64-640.
    suffix = re.sub("[/:]", "-", suffix.replace(" ", ""))
    stem = re.sub(r"(?<=.)-k\d[\d-]*$", "", name)
    return stem[: 128 - len(suffix)] + suffix


def check_transfer(
    policy: PruningPolicy, backbone: BackboneShape | None = None
) -> SafetyRecord:
    """Safety check of a transferred policy, on images with the inputs of the backbone.

    Beyond :data:`MAX_PROBED_BUDGET` the images have [CLS] on every backbone.
    """
    if backbone is None or backbone.has_cls or policy.budget > MAX_PROBED_BUDGET:
        return safety_check(policy)
    # For a tower without [CLS], whose attention is a mean over queries.
    probes = [
        replace(probe, tower=replace(probe.require_tower(), cls=None))
        for probe in synthetic_probes(policy.budget)
    ]
    return safety_check(policy, probes)
