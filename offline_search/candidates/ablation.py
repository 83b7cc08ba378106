"""Ablations: candidates without one of the paper's components, or with a fixed exchange quota.

They are applied to every candidate of every strategy, so that an ablation searches a smaller space
instead of producing more invalid proposals. What is not of the component stays as it was proposed.
Malformed input is left for the loader to report.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from pydantic import JsonValue

from offline_search.candidates.components import JsonObject
from offline_search.settings import Library, Settings
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall, Component
from vllm_autoprune.tpdsl.states.state import PruningState

_SELECTORS_WITHOUT_QUOTA = ("reference_strict_preservation_selector", "quality_topk_selector")

_EXCHANGE = "reference_residual_exchange_selector"
_QUALITY_POOL: JsonObject = {"atom": "quality_pool_builder"}
_COVERAGE_POOL = "spatial_coverage_pool_builder"

_NEUTRAL: Mapping[Component, Mapping[str, float]] = {
    "anchoring": {"margin": 0.0},
    "diversity": {"max_sim": 1.0, "lam": 1.0},
    "fusion": {},
}
"""Numbers with which a selector that may bring a component goes without it."""


def state_components(state: PruningState, budget: int) -> frozenset[Component]:
    """The components that a state has at K.

    Its atoms say which they may bring. Several signals are fusion, and a selector that must leave
    tokens of the base policy in place, or prefers them by a margin, is anchoring.
    """
    present = {part for call in _calls(state) for part in ATOMS.of(call).components}
    if len(state.scoring.signals) > 1:
        present.add("fusion")
    selector = state.constraints.selector
    numbers = selector.model_dump()
    if selector.bounds(budget)[0] < budget or numbers.get("margin", 0.0) > 0:
        present.add("anchoring")
    neutral = any(numbers.get(name) == value for name, value in _NEUTRAL["diversity"].items())
    return frozenset(present if neutral else present | ATOMS.of(selector).components)


def _calls(state: PruningState) -> Iterator[AtomCall]:
    yield from state.source.priors
    yield from state.scoring.signals
    yield state.scoring.fusion
    yield from state.constraints.pool


def excluded_atoms(without: Collection[Component], library: Library = "searched") -> frozenset[str]:
    """Atoms that no candidate of a search without these components has."""
    removed = {name for name in ATOMS.names() if _is_excluded({"atom": name}, without)}
    own = {n for n in ATOMS.names() if ATOMS[n].origin == "extension"} if library == "paper" else ()
    return frozenset(removed.union(own))


def fixed_numbers(without: Collection[Component], quota: int | None) -> JsonObject:
    """Numbers that selectors have, where they take them, in a search with these ablations."""
    numbers: JsonObject = {} if quota is None else {"q_e": quota, "r_min": None}
    for component in without:
        numbers |= _NEUTRAL[component]
    return numbers


def ablate(components: JsonObject, settings: Settings) -> JsonObject:
    """Remove what the settings exclude from a proposal, and set the quota that they fix."""
    scoring, constraints = components.get("scoring"), components.get("constraints")
    if isinstance(scoring, dict):
        scoring = _ablate_scoring(scoring, settings)
    if isinstance(constraints, dict):
        constraints = {
            **constraints,
            "pool": _ablate_pool(constraints.get("pool"), settings),
            "selector": _ablate_selector(constraints.get("selector"), settings),
        }
    changed: JsonObject = {**components, "scoring": scoring, "constraints": constraints}
    source = components.get("source")
    if isinstance(source, dict) and isinstance(priors := source.get("priors"), list):
        changed["source"] = {**source, "priors": _without(priors, settings)}
    return changed


def _ablate_scoring(scoring: JsonObject, settings: Settings) -> JsonObject:
    signals, fusion = scoring.get("signals"), scoring.get("fusion")
    if isinstance(signals, list):
        kept = _without(signals, settings) or [_only_signal()]
        # The signal that counts most: the first one would be the same in most proposals.
        signals = [max(kept, key=_weight)] if "fusion" in settings.without else kept
    if isinstance(fusion, dict) and _is_excluded(fusion, settings.without):
        fusion = {**fusion, "atom": "weighted_product_fusion"}
        fusion.pop("beta", None)
    return {**scoring, "signals": signals, "fusion": fusion}


def _only_signal() -> JsonValue:
    return {"atom": ATOMS.names("scoring")[0], "weight": 1.0}


def _weight(signal: JsonValue) -> float:
    weight = signal.get("weight", 1.0) if isinstance(signal, dict) else None
    return weight if isinstance(weight, int | float) else 0.0


def _ablate_pool(pool: JsonValue, settings: Settings) -> JsonValue:
    if not isinstance(pool, list):
        return pool
    kept = _without(pool, settings) or [_QUALITY_POOL]
    return [_widen(call) for call in kept] if "anchoring" in settings.without else kept


def _widen(call: JsonValue) -> JsonValue:
    """The pool with at least K tokens: with fewer, tokens of the base policy would have to stay."""
    if not isinstance(call, dict):
        return call
    if call.get("atom") == _COVERAGE_POOL:  # a token of each cell, however large K is
        both: list[JsonValue] = [call, _QUALITY_POOL]
        return {"atom": "multi_source_pool_builder", "pool_ratio": 16.0, "sources": both}
    ratio, sources = call.get("pool_ratio"), call.get("sources")
    if isinstance(ratio, int | float):
        call = {**call, "pool_ratio": max(1.0, ratio)}
    if isinstance(sources, list):
        call = {**call, "sources": [*sources[:7], _QUALITY_POOL]}  # at most eight
    return call


def _ablate_selector(selector: JsonValue, settings: Settings) -> JsonValue:
    if {"anchoring", "diversity"} <= set(settings.without):
        return {"atom": "quality_topk_selector"}
    if not isinstance(selector, dict):
        return selector
    fixed = settings.quota is not None and _atom_of(selector) in _SELECTORS_WITHOUT_QUOTA
    if fixed or _is_excluded(selector, settings.without):
        selector = {name: selector[name] for name in ("q_e", "r_min") if name in selector}
        selector = {"atom": _EXCHANGE, **selector}
    numbers, known = fixed_numbers(settings.without, settings.fixed_quota), _parameters(selector)
    return {**selector, **{name: value for name, value in numbers.items() if name in known}}


def _without(calls: list[JsonValue], settings: Settings) -> list[JsonValue]:
    return [call for call in calls if not _is_excluded(call, settings.without)]


def _is_excluded(call: JsonValue, without: Collection[Component]) -> bool:
    """Whether an atom brings what is removed, and no number of it can take that away."""
    atom, parameters = _atom_of(call), _parameters(call)
    brought = ATOMS[atom].components & set(without) if atom in ATOMS else ()
    return any(not parameters & _NEUTRAL[component].keys() for component in brought)


def _parameters(call: JsonValue) -> frozenset[str]:
    atom = _atom_of(call)
    return frozenset(ATOMS[atom].call.parameters()) if atom in ATOMS else frozenset()


def _atom_of(call: JsonValue) -> str:
    atom = call.get("atom") if isinstance(call, dict) else None
    return atom if isinstance(atom, str) else ""
