"""Candidate states: with a core and a delta, without a core, and without the question."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Literal, get_args

from pydantic import JsonValue

from vllm_autoprune import PruningState, load_state, materialize
from vllm_autoprune.tpdsl.atoms.reassembly import RECIPES

Family = Literal["split", "unsplit", "question-free"]
FAMILIES: tuple[Family, ...] = get_args(Family)

JsonObject = dict[str, JsonValue]

QUESTION_FREE = ("divprune", "visionzip", "prumerge_plus")
"""Base policies that read no question; they also choose cores."""

_READING = ("cdpruner", "trim")
_SHARES = (0.25, 0.5, 0.75)
_BLENDS = ((0.0, 0.0), (0.15, 0.4), (0.3, 0.4), (0.5, 0.4), (0.7, 0.4))
"""Start values of a core: cover and strength."""
_STRENGTHS = (0.2, 0.4)
_RADIUS = 2
_UNMERGED: JsonObject = {"atom": "mean_residual", "strength": 0.0}
_ATOMS = {tuple(level.name for level in recipe.levels): name for name, recipe in RECIPES.items()}
_LEVELS = (
    ("nearest", "soft", "local"),
    ("mean", "similarity_weighted"),
    ("residual", "average"),
    ("raster", "score", "pick"),
)
"""Reassemblies by axis, without those that read the question or replace rows."""


def family_of(state: PruningState, budget: int) -> Family:
    """The family of a state at K: a core that leaves no token for the question is question-free."""
    policy = materialize(state, budget)
    if not policy.reads_instruction:
        return "question-free"
    return "split" if policy.core else "unsplit"


def start_states(family: Family, budget: int) -> list[PruningState]:
    """The coarse grid of a family."""
    start = {"split": _split, "unsplit": _unsplit, "question-free": _question_free}[family]
    return _distinct(start(), family, budget)


def neighbours(state: PruningState, family: Family, budget: int) -> list[PruningState]:
    """States of the same family that differ in one choice or one step of a number."""
    return _distinct(_changed(state, family), family, budget)


def _question_free() -> Iterator[PruningState]:
    found = _document("minillava")
    for policy, reassembly in product(QUESTION_FREE, _reassemblies()):
        yield _state({**found, "base_policy": _call(policy), "reassembly": reassembly})


def _unsplit() -> Iterator[PruningState]:
    for name in ("minillava", "autoprune"):
        yield _state(_document(name))
        for reassembly in _reassemblies():
            yield _state({**_document(name), "reassembly": reassembly})


def _split() -> Iterator[PruningState]:
    cores = product(_SHARES, QUESTION_FREE, _BLENDS)
    for (share, policy, (cover, strength)), name in product(
        cores, ("minillava", "cdpruner", "autoprune")
    ):
        core: JsonObject = {"share": share, "policy": _call(policy)}
        core |= {"cover": cover, "strength": strength}
        yield _state({**_document(name), "core": core})


def _reassemblies() -> Iterator[JsonObject]:
    yield _UNMERGED
    assignments, (aggregation, *_), outputs, orders = _LEVELS
    for assign, output, order in product(assignments, outputs, orders[:2]):
        for strength in _STRENGTHS:
            yield _reassembly((assign, aggregation, output, order), strength, _RADIUS)


def _reassembly(levels: tuple[str, ...], strength: float, radius: int) -> JsonObject:
    call: JsonObject = {"atom": _ATOMS[levels], "strength": strength}
    return {**call, "radius": radius} if levels[0] == "local" else call


def _changed(state: PruningState, family: Family) -> Iterator[PruningState]:
    document = _document_of(state)
    policies = QUESTION_FREE if family == "question-free" else _READING
    yield from (_state({**document, "base_policy": _call(policy)}) for policy in policies)
    yield from (_state({**document, "reassembly": call}) for call in _changed_reassembly(state))
    if family == "split":
        yield from (_state({**document, "core": core}) for core in _changed_core(state))


def _changed_reassembly(state: PruningState) -> Iterator[JsonObject]:
    call = state.reassembly.model_dump(mode="json")
    levels = tuple(level.name for level in RECIPES[state.reassembly.atom].levels)
    strength, radius = float(call.get("strength", 0.0)), int(call.get("radius", _RADIUS))
    for axis, names in enumerate(_LEVELS):
        for name in names:
            yield _reassembly((*levels[:axis], name, *levels[axis + 1 :]), strength, radius)
    for step in (-0.1, 0.1):
        yield _reassembly(levels, _within(strength + step, 0.0, 0.5), radius)
    for wider in (-1, 1):
        yield _reassembly(levels, strength, max(1, radius + wider))


def _changed_core(state: PruningState) -> Iterator[JsonObject]:
    assert state.core is not None
    core: JsonObject = state.core.model_dump(mode="json")
    for step in (-0.125, 0.125):
        yield {**core, "share": _within(state.core.share + step, 0.125, 0.875)}
        yield {**core, "cover": _within(state.core.cover + step, 0.0, 0.9)}
        yield {**core, "strength": _within(state.core.strength + 0.8 * step, 0.0, 0.5)}
    yield {**core, "cover": 0.0, "strength": 0.0}
    yield from ({**core, "policy": _call(policy)} for policy in QUESTION_FREE)


def shares_half(state: PruningState) -> bool:
    """Whether at least half of K is core, so that most of what can be shared is."""
    return state.core is not None and state.core.share >= 0.5


def _within(value: float, least: float, most: float) -> float:
    return round(min(max(value, least), most), 4)


def _distinct(states: Iterator[PruningState], family: Family, budget: int) -> list[PruningState]:
    """Each behaviour of the family once."""
    unique = {state.digest: state for state in states if family_of(state, budget) == family}
    return list(unique.values())


def _call(policy: str) -> JsonObject:
    return {"name": policy, "params": {}}


def _document(name: str) -> JsonObject:
    return _document_of(load_state(name))


def _document_of(state: PruningState) -> JsonObject:
    document: JsonObject = json.loads(state.dumps())
    return document


def _state(document: Mapping[str, JsonValue]) -> PruningState:
    return load_state({**document, "name": "candidate", "provenance": {}})


def describe(state: PruningState) -> str:
    """The choices of a state that the search varies."""
    parts = [state.base_policy.name]
    if state.constraints.selector.atom != "reference_strict_preservation_selector":
        parts.append("exchange")
    call = state.reassembly.model_dump(mode="json")
    if call.get("strength"):
        cell = RECIPES[state.reassembly.atom].cell
        radius = f" radius {call['radius']}" if "radius" in call else ""
        parts.append(f"{cell} {call['strength']:g}{radius}")
    if state.core is not None:
        core = state.core
        parts.append(f"core {core.share:g} by {core.policy.name}")
        if core.cover:
            parts.append(f"cover {core.cover:g}, strength {core.strength:g}")
    return ", ".join(parts)
