"""Transfer: a state re-materialized for another budget or backbone, with a record of every change.

Knows nothing about how a state is executed. The searched structure is never touched: which base
policy, which signals with which weights, which pool, how many exchanges. What may change is what
follows from the budget and from the backbone (the paper's cross-budget and cross-backbone
transfer), and what was said about the old ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic import JsonValue

from vllm_autoprune.backbones import GEOMETRIES, Geometry
from vllm_autoprune.errors import Problem, UnsupportedModelError
from vllm_autoprune.tpdsl.atom import ATOMS
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.budget import FIXED_BUDGETS, split_over_tiles
from vllm_autoprune.tpdsl.changes import Change, put
from vllm_autoprune.tpdsl.materialize import PruningPolicy, materialize
from vllm_autoprune.tpdsl.scoring import Relevance
from vllm_autoprune.tpdsl.state import PruningState

_R_MIN = "/constraints/selector/r_min"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A field that depends on budget or backbone and stays as it is: what it now means."""

    where: str
    value: JsonValue
    meaning: str


@dataclass(frozen=True, slots=True)
class Transfer:
    """The re-materialized state, its policy at K, and the record of how it came about.

    The record is complete: the changes applied to the old state give the new one.
    """

    state: PruningState
    policy: PruningPolicy
    changes: tuple[Change, ...]
    resolved: tuple[Resolved, ...]


def transfer(
    state: PruningState,
    budget: int | None = None,
    backbone: Geometry | None = None,
    name: str | None = None,
) -> Transfer:
    """The state for K tokens (by default its own) on a backbone (by default whatever serves it).

    Raises :class:`BudgetError` where the state does not allow K, and
    :class:`UnsupportedModelError` where its base policy reads what the backbone does not have.
    """
    found: list[Change] = []
    if budget is not None:
        found += _for_budget(state, budget)
    if backbone is not None:
        _require_inputs(state, backbone)
        found += _for_backbone(state, backbone)
    if found or backbone is not None or name is not None:
        found += _told_apart(state, budget, backbone, name)
    made = tuple(change for change in found if change.before != change.after)
    data = document(state)
    for change in made:
        put(data, change.where, change.after)
    target = PruningState.model_validate(data)
    policy = materialize(target, budget)
    return Transfer(target, policy, made, _resolved(policy, backbone))


def document(state: PruningState) -> dict[str, JsonValue]:
    """The state as the JSON object in its file, defaults written out."""
    data: dict[str, JsonValue] = state.model_dump(mode="json")
    return data


def _for_budget(state: PruningState, budget: int) -> list[Change]:
    """Budget atom and r_min; empty where K is the state's own."""
    if budget == materialize(state).budget:
        return []
    exact = budget in FIXED_BUDGETS
    held = budget if exact else min((k for k in FIXED_BUDGETS if k > budget), default=640)
    why = f"K = {budget}"
    if not exact:
        why = (
            f"the language has no fixed budget of K = {budget}, so the state holds {held}: serve "
            f"it with --autoprune-budget {budget}"
        )
    changed = [_change("/budget/atom", state.budget.atom, f"fixed_budget@{held}", why)]
    selector = state.constraints.selector
    if selector.r_min is not None:
        r_min = max(0, budget - selector.q_e) if exact else None
        why = f"r_min = K - q_e = {max(0, budget - selector.q_e)}"
        changed.append(_change(_R_MIN, selector.r_min, r_min, why))
    return changed


def _for_backbone(state: PruningState, backbone: Geometry) -> list[Change]:
    """Direction of relevance, where the state insists on one."""
    found = []
    for index, call in enumerate(state.scoring.signals):
        if isinstance(call, Relevance) and call.sign != "auto":
            why = f"relevance on {backbone.name} is measured in {_SPACES[backbone.relevance]}"
            where = f"/scoring/signals/{index}/sign"
            found.append(_change(where, call.sign, backbone.sign, why))
    return found


_SPACES = {"clip": "CLIP's joint space", "language": "the language model's embedding space"}


def _told_apart(
    state: PruningState, budget: int | None, backbone: Geometry | None, name: str | None
) -> list[Change]:
    """Name and provenance: evidence measured elsewhere does not speak for the new state."""
    k = materialize(state).budget if budget is None else budget
    target = f"K = {k}" + (f" on {backbone.name}" if backbone else "")
    old = state.provenance
    origin = f"Re-materialized from {state.name} ({state.digest[:12]}) for {target}."
    notes = f"{old.notes} {origin}".strip()
    stale = f"was measured before the transfer; nothing has been measured for {target} yet"
    scores: JsonValue = dict(old.scores)
    return [
        _change("/name", state.name, name or _renamed(state.name, k, backbone), "tells them apart"),
        _change("/provenance/evaluated_on", old.evaluated_on, "", stale),
        _change("/provenance/scores", scores, {}, stale),
        _change("/provenance/notes", old.notes, notes, "where the state comes from"),
    ]


def _renamed(name: str, budget: int, backbone: Geometry | None) -> str:
    """``autoprune-k32`` -> ``autoprune-llava-next-7b-k160``, within a name's 128 characters."""
    known = "|".join(re.escape(known) for known in GEOMETRIES)
    match = re.fullmatch(rf"(?P<stem>.+?)(?:-(?P<backbone>{known}))?(?:-k\d+)?", name)
    assert match is not None
    on = backbone.name if backbone else match["backbone"]
    suffix = (f"-{on}" if on else "") + f"-k{budget}"
    return match["stem"][: 128 - len(suffix)] + suffix


def _require_inputs(state: PruningState, backbone: Geometry) -> None:
    policy = BASE_POLICIES[state.base_policy.name]
    if "cls_attention" in policy.needs and not backbone.has_cls:
        what = f"{policy.name} reads the attention of [CLS], which {backbone.name} does not have"
        mend = "choose a state with another base policy; its search has to be done anew"
        raise UnsupportedModelError(
            f"state {state.name}", [Problem("/base_policy/name", what, mend)]
        )


def _resolved(policy: PruningPolicy, backbone: Geometry | None) -> tuple[Resolved, ...]:
    """Every field that depends on budget or backbone, as it is in the new state."""
    state, k = policy.state, policy.budget
    tiles = 1 if backbone is None else backbone.tiles
    shares = split_over_tiles(k, tiles)
    kept = f"K = {k}" + (
        f", over {tiles} tiles: {' + '.join(map(str, shares))}" if tiles > 1 else ""
    )
    selector = state.constraints.selector
    found = [
        Resolved("/budget/atom", state.budget.atom, kept),
        Resolved("/constraints/selector/q_e", selector.q_e, f"at most {policy.quota} exchanges"),
        Resolved(_R_MIN, selector.r_min, f"at least {policy.r_min} reference tokens stay"),
    ]
    for index, call in enumerate(state.scoring.signals):
        where = f"/scoring/signals/{index}"
        if isinstance(call, Relevance):
            means = "as the text tower says" if backbone is None else f"{backbone.sign} here"
            found.append(Resolved(f"{where}/sign", call.sign, f"direction of relevance: {means}"))
        if backbone and not backbone.has_cls and "cls_attention" in ATOMS.of(call).needs:
            means = f"no [CLS] on {backbone.name}: closeness to the mean token stands in"
            found.append(Resolved(f"{where}/atom", call.atom, means))
    return tuple(found)


def _change(where: str, before: JsonValue, after: JsonValue, why: str) -> Change:
    return Change(where, "changed", before, after, why)
