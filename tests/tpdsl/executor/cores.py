"""States with a core, for the tests of them."""

from __future__ import annotations

import dataclasses

import jsonschema  # type: ignore[import-untyped]
import torch

from tests.tpdsl.samples import edited, sample, state
from vllm_autoprune import (
    PruningPolicy,
    PruningState,
    RefinedTokens,
    VisualTokens,
    refine,
)
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.materialize import core_policy

QUESTION_FREE = [name for name, policy in BASE_POLICIES.items() if policy.core is not None]
CORES: dict[str, dict[str, object]] = {
    "divprune": {"share": 0.5},
    "global": {
        "share": 0.5,
        "policy": {"name": "divprune", "params": {"tile_scope": "global"}},
    },
    "merging": {"share": 0.5, "policy": {"name": "visionzip"}},
    "extra rows": {"share": 0.5, "policy": {"name": "prumerge_plus"}},
    "cover": {"share": 0.5, "cover": 0.5, "strength": 0.25},
    "almost all": {"share": 0.9, "cover": 0.9, "strength": 0.5},
}
UNCHANGED: dict[str, object] = {"/constraints/selector/q_e": 0}
BLEND: dict[str, object] = {"/reassembly": {"atom": "mean_residual", "strength": 0.5}}


def with_core(core: dict[str, object], changes: dict[str, object] | None = None) -> PruningState:
    return state({**(changes or {}), "/core": core})


def asked_otherwise(tokens: VisualTokens) -> VisualTokens:
    """The same images with the opposite question."""
    instruction = tokens.require_instruction()
    opposite = dataclasses.replace(instruction, text=-instruction.text)
    return dataclasses.replace(tokens, instruction=opposite)


def assert_split(policy: PruningPolicy, tokens: VisualTokens) -> RefinedTokens:
    """K unique tokens, core first, no fallback, and a core that no question changes."""
    actual = refine(policy, tokens)
    assert actual.features.shape[1] == actual.indices.shape[1] == policy.budget
    assert actual.fallback.tolist() == [0] * tokens.batch
    assert all(row.unique().numel() == policy.budget for row in actual.indices)
    if policy.core == 0:
        return actual
    own = slice(policy.core)
    unasked = dataclasses.replace(tokens, instruction=None, language=None)
    for other in (
        refine(core_policy(policy.state, policy.core), unasked),
        refine(policy, asked_otherwise(tokens)),
    ):
        assert torch.equal(actual.indices[:, own], other.indices[:, own])
        assert torch.equal(actual.features[:, own], other.features[:, own])
    return actual


def accepts(core: dict[str, object]) -> bool:
    schema = PruningState.model_json_schema()
    return bool(jsonschema.Draft202012Validator(schema).is_valid(edited(sample(), {"/core": core})))
