"""Example policies, and assertions on every selection."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tests.tpdsl.samples import sample, state
from vllm_autoprune import Grid, PruningPolicy, RefinedTokens, VisualTokens, materialize
from vllm_autoprune.ops.rowwise import evenly_spaced, mask_from_indices

VARIANTS: dict[str, dict[str, object]] = {
    "shipped": {},
    "divprune": {"/base_policy": {"name": "divprune"}},
    "global": {"/base_policy": {"name": "divprune", "params": {"tile_scope": "global"}}},
    "dpp": {"/constraints/selector": {"atom": "anchor_controlled_pool_dpp_selector", "q_e": 4}},
    "conditional": {
        "/constraints/selector": {"atom": "anchor_controlled_pool_dpp_selector", "q_e": 4},
        "/scoring/kernel": {"atom": "runtime_conditional_similarity_kernel", "theta": 0.5},
    },
    "residual": {"/reassembly/strength": 0.5},
    "base alone": {"/constraints/selector/q_e": 0},
    "anything goes": {"/constraints/selector/q_e": 640},
    "r_min": {"/constraints/selector": {**sample()["constraints"]["selector"], "r_min": 1}},
}
"""Changes to the shipped state; between them they run every atom but the safety checks."""

GRIDS = [Grid(6, 6), Grid(3, 4, tiles=3), Grid(1, 40), Grid(4, 4, tiles=5)]

EVENLY: list[int] = evenly_spaced(1, 36, 8, torch.device("cpu"))[0].tolist()


def policy_of(variant: str = "shipped", budget: int = 8) -> PruningPolicy:
    return materialize(state(VARIANTS[variant]), budget)


def same(
    one: RefinedTokens, other: RefinedTokens, rows: tuple[slice | list[int], slice | list[int]]
) -> bool:
    """Whether the given rows of two results are bit-identical."""
    mine, yours = rows
    for field in dataclasses.fields(RefinedTokens):
        a, b = vars_of(one)[field.name], vars_of(other)[field.name]
        if (a is None) != (b is None):
            return False
        if a is not None and b is not None and not torch.equal(a[mine], b[yours]):
            return False
    return True


def vars_of(outcome: RefinedTokens) -> dict[str, Tensor | None]:
    return {
        "features": outcome.features,
        "indices": outcome.indices,
        "reference": outcome.reference,
        "exchanged": outcome.exchanged,
        "fallback": outcome.fallback,
        "quality": outcome.quality,
    }


def assert_sound(policy: PruningPolicy, tokens: VisualTokens, outcome: RefinedTokens) -> None:
    """Assert the guarantees for every policy, image and budget below N."""
    k = policy.budget
    assert outcome.features.shape == (tokens.batch, k, tokens.features.shape[2])
    assert outcome.features.dtype == tokens.features.dtype
    assert bool(outcome.features.isfinite().all())
    assert outcome.indices.shape == outcome.reference.shape == (tokens.batch, k)
    assert bool((outcome.indices.diff(dim=1) > 0).all())
    assert int(outcome.indices.min()) >= 0 and int(outcome.indices.max()) < tokens.count
    base = mask_from_indices(outcome.reference, tokens.count)
    assert base.sum(dim=1).tolist() == [k] * tokens.batch
    shared = (mask_from_indices(outcome.indices, tokens.count) & base).sum(dim=1)
    assert torch.equal(outcome.exchanged, k - shared)
    assert int(shared.min()) >= policy.r_min
    assert int(outcome.exchanged.max()) <= policy.quota
