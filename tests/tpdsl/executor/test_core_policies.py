"""Cores and deltas of every base policy: what they keep, and how they continue."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.tpdsl.executor.cores import (
    BLEND,
    CORES,
    UNCHANGED,
    accepts,
    assert_split,
    with_core,
)
from tests.tpdsl.samples import (
    images,
    refused_with,
    state,
)
from vllm_autoprune import (
    Grid,
    materialize,
    refine,
    safety_check,
)
from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.ops.rowwise import min_max_normalise
from vllm_autoprune.tpdsl.atoms.scoring import instruction_relevance
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.materialize import core_policy, delta_policy
from vllm_autoprune.tpdsl.refine import give_core, select_tokens
from vllm_autoprune.tpdsl.safety import synthetic_probes


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("base", BASE_POLICIES)
def test_every_core_of_every_base_policy(base: str, core: str) -> None:
    split = with_core(CORES[core], {**BLEND, "/base_policy": {"name": base}})
    for budget in (1, 5, 12):
        policy = materialize(split, budget)
        record = safety_check(policy)
        assert record.valid, (budget, record.failures())
        for tokens in synthetic_probes(budget):
            assert_split(policy, tokens)


CONTINUING = ["cdpruner", "cen_cdpruner", "cen_divprune", "divprune", "fsr", "idpruner"]
"""Base policies that continue from a core by features, attention and relevance."""


@pytest.mark.parametrize("base", CONTINUING)
@pytest.mark.parametrize("tiles", [2, 3, 5])
def test_every_size_of_core_next_to_all_tokens_of_all_tiles(base: str, tiles: int) -> None:
    tokens = images(4, grid=Grid(2, 2, tiles=tiles))
    split = with_core({"share": 0.5}, {"/base_policy": {"name": base}})
    for core in range(1, tokens.count):
        assert_split(materialize(split, tokens.count - 1, core), tokens)


@pytest.mark.parametrize("base", CONTINUING)
def test_core_and_delta_together_are_spread_over_tiles_as_k_is(base: str) -> None:
    tokens = images(4, grid=Grid(4, 4, tiles=3))
    split = with_core({"share": 0.5}, {"/base_policy": {"name": base}, **UNCHANGED})
    for core in range(1, 11):
        kept = refine(materialize(split, 11, core), tokens).indices
        for row in kept // 16:
            assert row.bincount(minlength=3).tolist() == [4, 4, 3]


def test_the_delta_of_cdpruner_is_greedy_map_with_the_core_as_anchors() -> None:
    tokens = images(6, batch=3)
    policy = materialize(with_core({"share": 0.5}, UNCHANGED), 12)
    actual = refine(policy, tokens)
    instruction = tokens.require_instruction()
    relevance = min_max_normalise(-instruction_relevance(instruction), offset=1e-6)
    core = actual.indices[:, :6]
    expected = greedy_map(tokens.cosine, relevance, 12, anchors=core)[:, 6:]
    assert actual.reference[:, 6:].tolist() == expected.tolist()
    assert actual.indices[:, 6:].tolist() == expected.sort(dim=1).values.tolist()


def test_a_delta_from_cached_factors_is_the_same() -> None:
    tokens = images(6, batch=3, grid=Grid(3, 4, tiles=3))
    policy = materialize(with_core({"share": 0.5}), 12)
    plain = give_core(
        policy, tokens, refine(core_policy(policy.state, policy.core), tokens).indices
    )
    condition = policy.base.condition
    assert condition is not None
    known = dataclasses.replace(
        plain, conditioned=condition(policy.state.base_policy.params, tokens, plain.indices)
    )
    fresh, kept = (select_tokens(delta_policy(policy), tokens, part) for part in (plain, known))
    assert torch.equal(fresh.indices, kept.indices)


def test_the_delta_of_divprune_continues_its_own_core() -> None:
    tokens = images(6, batch=3)
    split = with_core({"share": 0.5}, {"/base_policy": {"name": "divprune"}, **UNCHANGED})
    alone = state({"/base_policy": {"name": "divprune"}, **UNCHANGED})
    kept = refine(materialize(split, 12), tokens).indices.sort(dim=1).values
    assert torch.equal(kept, refine(materialize(alone, 12), tokens).indices)


@pytest.mark.parametrize("base", ["cen_divprune", "scope", "idpruner"])
def test_a_policy_without_a_question_continues_its_own_core(base: str) -> None:
    (tokens, *_) = synthetic_probes(12)
    own: dict[str, object] = {"/base_policy": {"name": base}, **UNCHANGED}
    split = with_core({"share": 0.5, "policy": {"name": base}}, own)
    kept = refine(materialize(split, 12), tokens).indices.sort(dim=1).values
    assert torch.equal(kept, refine(materialize(state(own), 12), tokens).indices)


@pytest.mark.parametrize(
    ("base", "params"), [("cen_cdpruner", {"relevance": False}), ("mmtok", {"words": False})]
)
def test_the_core_of_a_policy_is_its_form_without_the_question(
    base: str, params: dict[str, object]
) -> None:
    (tokens, *_) = synthetic_probes(12)
    own: dict[str, object] = {"/base_policy": {"name": base}, **UNCHANGED}
    split = with_core({"share": 0.5, "policy": {"name": base}}, own)
    assert (
        split.core is not None and split.core.policy.params.model_dump().items() >= params.items()
    )
    silent = state({**own, "/base_policy": {"name": base, "params": params}})
    core = refine(materialize(split, 12), tokens).indices[:, :6]
    assert torch.equal(core, refine(materialize(silent, 6), tokens).indices)
    asking = with_core({"share": 0.5, "policy": {"name": base, "params": params}}, own)
    assert asking.digest == split.digest
    on = dict.fromkeys(params, True)
    call = {"share": 0.5, "policy": {"name": base, "params": on}}
    ((where, _),) = refused_with({"/core": call})
    assert where.startswith("/core/policy/params/")
    assert not accepts(call)


@pytest.mark.parametrize("base", ["trim", "dart"])
def test_a_policy_that_does_not_continue_keeps_its_own_first_picks(base: str) -> None:
    (tokens, *_) = synthetic_probes(12)
    changes = {"/base_policy": {"name": base}, **UNCHANGED}
    policy = materialize(with_core({"share": 0.5}, changes), 12)
    actual = refine(policy, tokens)
    picks = policy.base.select(policy.state.base_policy.params, tokens, 12).picks
    for row, own in zip(picks.tolist(), actual.indices.tolist(), strict=True):
        expected = [token for token in row if token not in own[:6]][:6]
        assert sorted(own[6:]) == sorted(expected)
