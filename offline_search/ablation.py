"""Ablations of the paper: a component taken away from every candidate, or one quota for all.

Knows nothing about proposers: whatever is proposed is cut down alike, so that a search without a
component is a search in a smaller space and not one with more mistakes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import JsonValue

Component = Literal["anchoring", "fusion", "diversity"]
"""The paper's table of components: what holds the base policy's picks, what makes several signals
one, and what keeps candidates unlike each other."""

JsonObject = dict[str, JsonValue]


def ablated(alpha: JsonObject, without: tuple[Component, ...], quota: int | None) -> JsonObject:
    """An alpha without some components and with a fixed quota; it may be malformed elsewhere."""
    scoring, constraints = alpha.get("scoring"), alpha.get("constraints")
    if isinstance(scoring, dict) and "fusion" in without:
        signals = scoring.get("signals")
        if isinstance(signals, list):
            scoring = {**scoring, "signals": signals[:1]}
    if isinstance(constraints, dict):
        if "diversity" in without:
            constraints = {**constraints, "pool": [{"atom": "quality_pool_builder"}]}
        constraints = {**constraints, "selector": _selector(constraints, without, quota)}
    return {**alpha, "scoring": scoring, "constraints": constraints}


def _selector(
    constraints: JsonObject, without: tuple[Component, ...], quota: int | None
) -> JsonValue:
    selector = constraints.get("selector")
    if "anchoring" in without:
        return {"atom": "quality_topk_selector"}
    if quota is None or not isinstance(selector, dict):
        return selector
    if "q_e" not in selector and selector.get("atom") in _WITHOUT_QUOTA:
        return {"atom": "reference_residual_exchange_selector", "q_e": quota}
    return {**selector, "q_e": quota}


_WITHOUT_QUOTA = ("reference_strict_preservation_selector", "quality_topk_selector")
