"""Description of a server for its clients and its log: state, budget, evidence, permissions."""

from __future__ import annotations

from pathlib import Path

from pydantic import JsonValue

from vllm_autoprune import __version__
from vllm_autoprune.serving.request_rules import REQUESTS_FLAG, RequestRules
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.text_tower import TextTower
from vllm_autoprune.tpdsl.materialize import materialize

_PERMISSIONS = {
    "budget": "their budget",
    "shipped-states": "a state that ships",
    "states": "any state",
}


def describe(served: ServedState) -> dict[str, JsonValue]:
    """JSON of `GET /v1/autoprune`: the served state, its digest, budget and evidence.

    The core size is the state's own, before it is moved to the edge of a KV block. The JSON
    contains no local path.
    """
    policy = materialize(served.state, served.budget)
    state = served.state
    rules = served.rules
    core: JsonValue = None
    if state.core is not None:
        core = {
            "k_c": policy.core,
            "share": state.core.share,
            "policy": state.core.policy.name,
        }
    detail: dict[str, JsonValue] = {
        level: budget.rule() for level, budget in rules.detail.as_dict().items()
    }
    return {
        "version": __version__,
        "architecture": served.architecture,
        "state": state.name,
        "digest": state.digest,
        "base_policy": policy.base.name,
        "budget": {
            "k": served.budget.rule(),
            "follows_image_size": policy.by_size is not None,
            "q_e": policy.quota,
            "r_min": None if policy.by_size else policy.r_min,
        },
        "positions": served.positions_of(state),
        "packed_only": served.capabilities.packed_only or None,
        "core": core,
        "cells": None if served.cells is None else str(served.cells),
        "tower": None if served.tower is None else str(served.tower),
        "reads": [*sorted(policy.needs)],
        "unavailable": [*sorted(need for need, _ in served.capabilities.unavailable)],
        "sign": 1 if served.text_tower is None else served.text_tower.sign,
        "relevance": _describe_relevance(served.text_tower)
        if policy.reads_instruction
        else None,
        "requests": _describe_rules(rules),
        "allows": {
            "level": rules.level if rules.explicit else "none",
            "tokens": [rules.minimum, rules.maximum],
        },
        "detail": detail or None,
        "recall": rules.recall,
        "history": None if rules.history is None else str(rules.history),
        "request_budget": rules.total,
        "evidence": state.provenance.model_dump(mode="json"),
    }


def _describe_relevance(tower: TextTower | None) -> str:
    """The embedding space in which relevance is measured, and the reason for it."""
    if tower is None:
        reason = "because no --autoprune-text-tower is given"
        return f"the language model's input embeddings, sign +1, {reason}"
    path = Path(tower.path)
    name = tower.path
    if path.exists() or path.is_absolute():
        name = "from a local folder"
    return f"CLIP text tower {name}, sign {tower.sign:+d}, because {tower.reason}"


def _describe_rules(rules: RequestRules) -> str:
    """What requests may set, and the flag that permits it."""
    if not rules.explicit:
        trusted = "with --trust-request-mm-kwargs: their budget"
        return f"nothing, because no {REQUESTS_FLAG} is given ({trusted})"
    if rules.level == "none":
        return f"nothing, by {REQUESTS_FLAG} none"
    tokens = f"{rules.minimum} to {rules.maximum} tokens of an image"
    text = f"{_PERMISSIONS[rules.level]}, {tokens}, by {REQUESTS_FLAG}"
    if rules.allows("shipped-states"):
        text += f", at a predicted {rules.cost:g} ms a selection or less"
    return text
