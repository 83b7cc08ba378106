"""Transfer: a state re-materialized for another budget or backbone, with a record of every change.

Knows nothing about how a state is executed. The searched structure is never touched: which base
policy, which signals with which weights, which pool, how many exchanges. What may change is what
follows from the budget and from the backbone (the paper's cross-budget and cross-backbone
transfer), and what was said about the old ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from pydantic import JsonValue

from vllm_autoprune.backbones import GEOMETRIES, Geometry
from vllm_autoprune.tpdsl.atom import ATOMS, by_default
from vllm_autoprune.tpdsl.budget import FIXED_BUDGETS, BudgetCall, split_over_tiles
from vllm_autoprune.tpdsl.changes import Change, put
from vllm_autoprune.tpdsl.check import LARGEST_PROBED, safety_check
from vllm_autoprune.tpdsl.constraints import BoundedSelector
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET, PruningPolicy, materialize
from vllm_autoprune.tpdsl.probes import synthetic_probes
from vllm_autoprune.tpdsl.safety import SafetyRecord
from vllm_autoprune.tpdsl.scoring import Relevance
from vllm_autoprune.tpdsl.source import EmbeddedView, ProjectedView, TowerView, ViewCall
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import VisualTokens

_R_MIN = "/constraints/selector/r_min"
_MAX_R_MIN = 640
"""The largest r_min that a state can state; null, which is K - q_e, knows no such bound."""


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

    Raises :class:`BudgetError` where the state does not allow K.
    """
    found: list[Change] = []
    if budget is not None:
        if not 1 <= budget <= MAX_BUDGET:
            materialize(state, budget)  # refuses it, in the words of every other command
        found += _for_budget(state, budget)
    if backbone is not None:
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


def check_transfer(made: Transfer, backbone: Geometry | None = None) -> SafetyRecord:
    """The safety check of a transferred policy, on images as the backbone sees them."""
    probes = synthetic_probes(min(made.policy.budget, LARGEST_PROBED))
    if backbone is None or backbone.has_cls or made.policy.budget > LARGEST_PROBED:
        return safety_check(made.policy)
    return safety_check(made.policy, [_without_cls(probe) for probe in probes])


def _without_cls(tokens: VisualTokens) -> VisualTokens:
    """Attention of a tower without [CLS] is a mean over its queries, but there is no [CLS] row."""
    return replace(tokens, tower=replace(tokens.require_tower(), cls=None))


def document(state: PruningState) -> dict[str, JsonValue]:
    """The state as the JSON object in its file, defaults written out."""
    data: dict[str, JsonValue] = state.model_dump(mode="json")
    return data


def _for_budget(state: PruningState, budget: int) -> list[Change]:
    """Budget atom and r_min; empty where K is the state's own."""
    if state.budget.range() == (budget, budget):
        return []
    changed = [_budget(state.budget, budget)]
    selector = state.constraints.selector
    if isinstance(selector, BoundedSelector) and selector.r_min is not None:
        r_min = max(0, budget - selector.q_e)
        why = f"r_min = K - q_e = {r_min}"
        changed.append(_change(_R_MIN, selector.r_min, r_min if r_min <= _MAX_R_MIN else None, why))
    return changed


def _budget(call: BudgetCall, budget: int) -> Change:
    why = f"K = {budget}"
    if budget in FIXED_BUDGETS and call.atom.startswith("fixed_budget@"):
        return _change("/budget/atom", call.atom, f"fixed_budget@{budget}", why)
    after: dict[str, JsonValue] = {"limit": call.limit}
    if budget in FIXED_BUDGETS:
        after["atom"] = f"fixed_budget@{budget}"
    else:
        why += ", which no fixed budget of the language is: floor and ceiling in one"
        after |= {"atom": "ratio_budget", "ratio": 1.0, "floor": budget, "ceiling": budget}
    return _change("/budget", call.model_dump(mode="json"), after, why)


def _for_backbone(state: PruningState, backbone: Geometry) -> list[Change]:
    """Token source, and direction of relevance where the state insists on one."""
    found = []
    if isinstance(state.source.tokens, TowerView) and not backbone.tower_rows:
        before = state.source.tokens.model_dump(mode="json")
        after = by_default(ViewCall, "vision_tokens@post_projector").model_dump(mode="json")
        why = f"the vision tower of {backbone.name} has no row for each visual token"
        found.append(_change("/source/tokens", before, after, why))
    for index, call in enumerate(state.scoring.signals):
        if isinstance(call, Relevance) and call.sign != "auto":
            why = f"relevance on {backbone.name} is measured in {_SPACES[backbone.relevance]}"
            where = f"/scoring/signals/{index}/sign"
            found.append(_change(where, call.sign, backbone.sign, why))
    return found


_NO_CLS = "no [CLS] here: the mean attention over queries stands in"
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


def _resolved(policy: PruningPolicy, backbone: Geometry | None) -> tuple[Resolved, ...]:
    """Every field that depends on budget or backbone, as it is in the new state."""
    state = policy.state
    found = [
        Resolved("/budget/atom", state.budget.atom, _kept(policy, backbone)),
        Resolved(
            "/constraints/selector/atom",
            state.constraints.selector.atom,
            f"at most {policy.quota} exchanges, at least {policy.r_min} reference tokens stay",
        ),
    ]
    view = state.source.tokens
    if backbone and backbone.tiles > 1 and isinstance(view, ProjectedView | EmbeddedView):
        near = "within each tile" if view.tile_scope == "per_tile" else "over all tiles"
        means = f"likeness is looked for {near}"
        found.append(Resolved("/source/tokens/tile_scope", view.tile_scope, means))
    no_cls = backbone is not None and not backbone.has_cls
    if no_cls and "cls_attention" in policy.base.needs:
        found.append(Resolved("/base_policy/name", policy.base.name, _NO_CLS))
    for index, call in enumerate(state.scoring.signals):
        where = f"/scoring/signals/{index}"
        if isinstance(call, Relevance):
            means = "as the text tower says" if backbone is None else f"{backbone.sign} here"
            found.append(Resolved(f"{where}/sign", call.sign, f"direction of relevance: {means}"))
        if no_cls and "cls_attention" in ATOMS.of(call).needs_of(call):
            means = f"{_NO_CLS}, or closeness to the mean token"
            found.append(Resolved(f"{where}/atom", call.atom, means))
    return tuple(found)


def _kept(policy: PruningPolicy, backbone: Geometry | None) -> str:
    """K, and how it falls to tiles."""
    if backbone is None:
        least, most = policy.state.budget.range()
        return f"K = {least} to {most}, by image" if policy.varies else f"K = {policy.budget}"
    k = policy.at(backbone.tokens, backbone.tiles).tokens_kept(backbone.tokens, backbone.tiles)
    shares = split_over_tiles(k, backbone.tiles)
    over = f", over {backbone.tiles} tiles: {' + '.join(map(str, shares))}"
    return f"K = {k}" + (over if backbone.tiles > 1 else "")


def _change(where: str, before: JsonValue, after: JsonValue, why: str) -> Change:
    return Change(where, "changed", before, after, why)
