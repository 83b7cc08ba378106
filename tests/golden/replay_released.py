"""Replay of the policy that AutoPrune's authors released: ``materialize`` and ``refine``."""

from __future__ import annotations

import json
from math import isqrt
from pathlib import Path
from typing import Any

import torch

from tests.golden.case import Case
from tests.golden.compare import Problems, find_differences, find_distances
from tests.golden.records import plain_instruction
from vllm_autoprune import PruningState, load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens, Words

AUTOPRUNE = Path(__file__).parents[2] / "policies" / "autoprune.json"

_SIGNALS = {
    "semantic": "instruction_guided_visual_relevance",
    "attn": "attention_proxy_saliency",
    "spatial": "spatial_centrality_prior",
    "redundancy": "redundancy_density_penalty",
    "contrast": "local_contrast_saliency",
}


def autoprune_released(case: Case) -> Problems:
    """Reference picks in order, kept tokens, token quality within 1e-4, rows within 1e-4."""
    refined = refine(materialize(released_state(case)), released_tokens(case))
    yield from find_differences("reference", refined.reference, case.recorded("reference"))
    yield from find_differences("keep", refined.indices, case.recorded("keep"))
    yield from find_distances(refined.features, case.recorded("features"), 1e-4)
    if refined.quality is not None:  # not computed where nothing is exchanged
        yield from find_distances(refined.quality, case.recorded("quality"), 1e-4)


def released_state(case: Case) -> PruningState:
    """The shipped state with the numbers of the case, which mostly are its own."""
    recipe: dict[str, Any] = case.recipe
    document: dict[str, Any] = json.loads(AUTOPRUNE.read_text())
    signals = {call["atom"]: call for call in document["scoring"]["signals"]}
    relevance = {"negative_mean": "negative_mean", "cosine": "words"}[recipe["relevance"]]
    signals[_SIGNALS["semantic"]]["measure"] = relevance
    signals[_SIGNALS["spatial"]]["bias"] = recipe["center_bias"]
    document["scoring"]["signals"] = [
        {**signals[_SIGNALS[name]], "weight": weight} for name, weight in recipe["weights"].items()
    ]
    document["constraints"]["selector"] |= {
        name: recipe[name] for name in ("q_e", "r_min", "lam", "keep_weight", "power")
    }
    document["reassembly"]["strength"] = recipe["scale"]
    budget = recipe["K"]
    document["budget"] = {"atom": "ratio_budget", "ratio": 1.0, "floor": budget, "ceiling": budget}
    return load_state(document)


def released_tokens(case: Case) -> VisualTokens:
    """B images on a square grid; the pooled text as the only word, where the case has one."""
    features = case.given("image_features")
    side, batch = isqrt(features.shape[1]), features.shape[0]
    text = case.given("text_embeds", cast=False).expand(batch, -1)
    words = None
    if "text_features" in case.inputs:
        pooled = case.given("text_features")[:, None]
        words = Words(pooled, torch.ones(pooled.shape[:2], dtype=torch.bool))
    return VisualTokens(
        features,
        Grid(side, side),
        instruction=plain_instruction(case.given("image_embeds", cast=False), text),
        words=words,
    )
