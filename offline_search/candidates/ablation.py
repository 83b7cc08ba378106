"""Ablations: candidates without one of the paper's components, or with a fixed exchange quota.

They are applied to every candidate of every strategy, so that an ablation searches a smaller space
instead of producing more invalid proposals. Malformed input is left for the loader to report.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue

from offline_search.candidates.components import JsonObject
from offline_search.settings import MAX_QUOTA, Settings
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall, Component
from vllm_autoprune.tpdsl.states.state import PruningState

_SELECTORS_WITHOUT_QUOTA = ("reference_strict_preservation_selector", "quality_topk_selector")

_EXCHANGE = "reference_residual_exchange_selector"
_QUALITY_POOL = "quality_pool_builder"
_PLAIN_FUSION: JsonObject = {"atom": "weighted_product_fusion"}


def state_components(state: PruningState, budget: int) -> frozenset[Component]:
    """The components that a state has at K.

    Its atoms say which they bring. Several signals are fusion, and a selector that must leave
    tokens of the base policy in place is anchoring.
    """
    present = {part for call in _calls(state) for part in ATOMS.of(call).components}
    if len(state.scoring.signals) > 1:
        present.add("fusion")
    if state.constraints.selector.bounds(budget)[0] < budget:
        present.add("anchoring")
    return frozenset(present)


def _calls(state: PruningState) -> Iterator[AtomCall]:
    yield from state.source.priors
    yield from state.scoring.signals
    yield state.scoring.fusion
    yield from state.constraints.pool
    yield state.constraints.selector


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
    signals = scoring.get("signals")
    if isinstance(signals, list):
        kept = _without(signals, settings) or [_only_signal()]
        signals = kept[:1] if "fusion" in settings.without else kept
    fusion = scoring.get("fusion")
    if _is_excluded(fusion, settings):
        fusion = _PLAIN_FUSION
    return {**scoring, "signals": signals, "fusion": fusion}


def _only_signal() -> JsonValue:
    return {"atom": ATOMS.names("scoring")[0], "weight": 1.0}


def _ablate_pool(pool: JsonValue, settings: Settings) -> JsonValue:
    if not isinstance(pool, list):
        return pool
    return _without(pool, settings) or [{"atom": _QUALITY_POOL}]


def _ablate_selector(selector: JsonValue, settings: Settings) -> JsonValue:
    without, atom = settings.without, _atom_of(selector)
    diverse = atom in ATOMS and "diversity" in ATOMS[atom].components
    if "anchoring" in without:
        # A DPP over the candidate's own pool, which may replace every token of the base policy.
        if "diversity" in without:
            return {"atom": "quality_topk_selector"}
        if not diverse or _is_excluded(selector, settings) or not isinstance(selector, dict):
            selector = {"atom": "anchor_controlled_pool_dpp_selector"}
        return {**selector, "q_e": MAX_QUOTA, "r_min": None}
    if not isinstance(selector, dict):
        return selector
    if diverse and "diversity" in without:
        selector = {name: selector[name] for name in ("q_e", "r_min") if name in selector}
        selector = {"atom": _EXCHANGE, **selector}
    if settings.quota is None:
        return selector
    if "q_e" not in selector and selector.get("atom") in _SELECTORS_WITHOUT_QUOTA:
        return {"atom": _EXCHANGE, "q_e": settings.quota}
    return {**selector, "q_e": settings.quota}


def _without(calls: list[JsonValue], settings: Settings) -> list[JsonValue]:
    return [call for call in calls if not _is_excluded(call, settings)]


def _is_excluded(call: JsonValue, settings: Settings) -> bool:
    atom = _atom_of(call)
    return atom in ATOMS and not ATOMS[atom].components.isdisjoint(settings.without)


def _atom_of(call: JsonValue) -> str:
    atom = call.get("atom") if isinstance(call, dict) else None
    return atom if isinstance(atom, str) else ""
