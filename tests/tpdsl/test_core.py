"""States with a core: tokens of K that are kept for every question, and the delta given them."""

from __future__ import annotations

import pickle
from dataclasses import replace

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tpdsl.samples import (
    BLEND,
    CORES,
    GRIDS,
    UNCHANGED,
    VARIANTS,
    Changes,
    edited,
    images,
    plain,
    refused_with,
    same,
    sample,
    state,
    take,
)
from vllm_autoprune import (
    BudgetError,
    Grid,
    PruningPolicy,
    PruningState,
    RefinedTokens,
    VisualTokens,
    load_state,
    materialize,
    refine,
    safety_check,
)
from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.ops.rowwise import gather_rows, mask_from_indices, min_max_normalise
from vllm_autoprune.tpdsl.atoms.scoring import instruction_relevance
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, Given
from vllm_autoprune.tpdsl.materialize import core_policy, delta_policy
from vllm_autoprune.tpdsl.refine import give_core, keep_reference, most_similar, select_tokens
from vllm_autoprune.tpdsl.safety import synthetic_probes
from vllm_autoprune.tpdsl.tokens import NextLayer, TowerStates

ACCEPTS = jsonschema.Draft202012Validator(PruningState.model_json_schema()).is_valid


def with_core(core: Changes, changes: Changes | None = None) -> PruningState:
    return state({**(changes or {}), "/core": core})


def assert_split(policy: PruningPolicy, tokens: VisualTokens) -> RefinedTokens:
    """K unique tokens, core first, no fallback, and a core that no question changes."""
    refined = refine(policy, tokens)
    assert refined.features.shape[1] == refined.indices.shape[1] == policy.budget
    assert refined.fallback.tolist() == [0] * tokens.batch
    assert all(row.unique().numel() == policy.budget for row in refined.indices)
    if policy.core:
        instruction, core = tokens.require_instruction(), slice(policy.core)
        opposite = replace(tokens, instruction=replace(instruction, text=-instruction.text))
        unasked = replace(tokens, instruction=None, language=None)
        for other in (
            refine(core_policy(policy.state, policy.core), unasked),
            refine(policy, opposite),
        ):
            assert torch.equal(refined.indices[:, core], other.indices[:, core])
            assert torch.equal(refined.features[:, core], other.features[:, core])
    return refined


@pytest.mark.parametrize("variant", VARIANTS)
@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(2, 35),
    data=st.data(),
    grid=st.sampled_from(GRIDS),
    share=st.sampled_from([0.2, 0.5, 0.9]),
    cover=st.sampled_from([0.0, 0.3, 0.9]),
)
def test_guarantees_of_every_split(
    variant: str,
    seed: int,
    budget: int,
    data: st.DataObject,
    grid: Grid,
    share: float,
    cover: float,
) -> None:
    split = with_core({"share": share, "cover": cover, "strength": 0.5}, VARIANTS[variant])
    policy = materialize(split, budget, data.draw(st.integers(1, budget)))
    assert_split(policy, images(seed, grid=grid))


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
    (tokens, *_) = synthetic_probes(12)
    kept = keep_reference(core_policy(split, 6), tokens)  # single tokens too
    assert kept.extra == 0 and kept.indices.shape[1] == 6
    assert torch.equal(kept.features, gather_rows(tokens.features, kept.indices))


@pytest.mark.parametrize(
    "selector",
    [
        {"atom": "quality_topk_selector"},
        {"atom": "anchor_controlled_pool_dpp_selector", "q_e": 4},
        {"atom": "constrained_pool_dpp_selector", "q_e": 4},
        {"atom": "maximal_marginal_relevance_pool_selector", "q_e": 4},
        {"atom": "reference_strict_margin_exchange_selector", "q_e": 4, "margin": 0.0},
    ],
)
@pytest.mark.parametrize("cover", [0.0, 0.5])
def test_no_selector_takes_a_token_of_the_core(selector: Changes, cover: float) -> None:
    kernel = {"atom": "runtime_conditional_similarity_kernel"}
    changes = {"/constraints/selector": selector, "/scoring/kernel": kernel}
    policy = materialize(with_core({"share": 0.5, "cover": cover}, changes), 12)
    assert int(assert_split(policy, images(10, batch=3)).exchanged.max()) > 0


def test_the_core_depends_on_its_size_and_not_on_k() -> None:
    split = with_core({"share": 0.5, "cover": 0.5, "strength": 0.5}, BLEND)
    small, large = (refine(materialize(split, budget, 6), images(5)) for budget in (8, 20))
    assert torch.equal(small.indices[:, :6], large.indices[:, :6])
    assert torch.equal(small.features[:, :6], large.features[:, :6])


@pytest.mark.parametrize("core", ["divprune", "cover"])
@pytest.mark.parametrize("grid", GRIDS)
def test_results_do_not_depend_on_the_batch(core: str, grid: Grid) -> None:
    tokens, policy = images(5, batch=4, grid=grid), materialize(with_core(CORES[core], BLEND), 9)
    together = refine(policy, tokens)
    for i in range(4):
        assert same(together, refine(policy, take(tokens, [i])), [i], [0])


@given(
    seed=st.integers(0, 10_000),
    grid=st.sampled_from(GRIDS),
    budget=st.integers(2, 30),
    cover=st.sampled_from([0.0, 0.3, 0.8]),
    core=st.sampled_from(["divprune", "visionzip", "prumerge_plus"]),
)
def test_no_token_is_merged_twice(
    seed: int, grid: Grid, budget: int, cover: float, core: str
) -> None:
    tokens = images(seed, grid=grid)
    # Rows tell how much of every token is in them: column 16 + i is token i's.
    marks = torch.eye(tokens.count).expand(tokens.batch, -1, -1)
    rows = torch.cat([tokens.features, marks], dim=2)
    tower = TowerStates(
        rows, rows[:, :, :8], lambda rows: rows,
        next_layer=NextLayer(torch.rand(2, grid.tokens), rows),
    )  # fmt: skip
    tokens = replace(tokens, features=rows, tower=tower)
    call: Changes = {"share": 0.5, "cover": cover, "strength": 0.5, "policy": {"name": core}}
    policy = materialize(with_core(call, {**BLEND, "/base_policy": {"name": "visionzip"}}), budget)
    refined = refine(policy, tokens)
    within = refined.features[:, :, 16:].abs() > 0
    part = give_core(policy, tokens, refined.indices[:, : policy.core])
    if torch.equal(part.closed, part.covered):
        assert int(within.sum(dim=1).max()) <= 1
        assert bool(within.gather(2, refined.indices[:, :, None]).all())
    else:  # K leaves too few tokens outside the cover: the delta keeps some, and merges none
        assert policy.budget + int(cover * tokens.count) > tokens.count
        discarded = ~mask_from_indices(refined.indices, tokens.count)
        assert int((within.sum(dim=1) * discarded).max()) <= 1


def test_the_delta_merges_every_token_that_the_core_does_not_stand_for() -> None:
    core: Changes = {"share": 0.5, "cover": 0.25, "strength": 0.5}
    tokens = images(3)
    kept = refine(materialize(with_core(core, {**BLEND, **UNCHANGED}), 8), tokens)
    delta = kept.indices[:, 4:]
    covered = most_similar(tokens, kept.indices[:, :4], int(0.25 * tokens.grid.per_tile))
    for image in range(tokens.batch):
        features, cosine = tokens.features[image], tokens.cosine[image]
        assert not bool(covered[image, delta[image]].any())
        owner = cosine[:, delta[image]].argmax(dim=1)
        free = ~covered[image]
        free[delta[image]] = False
        for row, token in enumerate(delta[image].tolist()):
            group, expected = features[free & (owner == row)], features[token]
            if len(group):
                expected = (expected + group.mean(dim=0)) / 2
            torch.testing.assert_close(kept.features[image, 4 + row], expected)


def test_an_exchange_takes_no_copy_of_a_core_token() -> None:
    """Token 3 copies token 0 of the core and has the highest quality, but is too similar to it."""
    tokens = replace(
        plain(torch.eye(4)[[0, 1, 2, 0]], Grid(2, 2)),
        cls_attention=torch.tensor([[0.5, 0.1, 0.2, 0.9]]),
    )
    changes: Changes = {
        "/base_policy": {"name": "divprune"},
        "/scoring/signals": [{"atom": "attention_proxy_saliency"}],
        "/constraints/selector": {
            "atom": "reference_strict_margin_exchange_selector", "q_e": 1, "margin": 0.0},
        "/constraints/pool": [{"atom": "quality_pool_builder", "pool_ratio": 2.0}],
    }  # fmt: skip
    closed = torch.tensor([[True, False, False, False]])
    core = Given(torch.tensor([[0]]), closed, closed, 1)
    assert select_tokens(materialize(state(changes), 1), tokens, core).indices.tolist() != [[3]]


@pytest.mark.parametrize("base", ["prumerge_plus", "visionzip"])
def test_priors_see_the_whole_budget(base: str) -> None:
    """At K = 5 of 5 tiles the published code keeps a token of each, at K - K_c = 2 it fails."""
    priors = {"priors": [{"atom": "native_teacher_mask_prior"}]}
    changes: Changes = {"/base_policy": {"name": base}, "/source": priors}
    record = safety_check(materialize(with_core({"share": 0.7}, changes), 5))
    assert record.valid, record.failures()


def test_what_cannot_be_read_falls_back_and_a_question_leaves_the_core_as_it_is() -> None:
    policy = materialize(with_core(CORES["cover"], BLEND), 8)
    clean, image, question = refine(policy, images(11)), images(11), images(11)
    image.features[0, 3] = torch.nan
    question.require_instruction().text[0] = torch.nan
    for tokens in (image, question):
        refined = refine(policy, tokens)
        assert refined.fallback.tolist() == [2, 0]
        assert refined.indices[0].unique().numel() == 8
        assert bool(refined.features.isfinite().all())
        assert same(refined, clean, [1], [1])
    assert torch.equal(refined.features[:, :4], clean.features[:, :4])


def test_the_delta_of_cdpruner_is_greedy_map_with_the_core_as_anchors() -> None:
    tokens = images(6, batch=3)
    refined = refine(materialize(with_core({"share": 0.5}, UNCHANGED), 12), tokens)
    relevance = min_max_normalise(-instruction_relevance(tokens.require_instruction()), 1e-6)
    expected = greedy_map(tokens.cosine, relevance, 12, anchors=refined.indices[:, :6])[:, 6:]
    assert refined.reference[:, 6:].tolist() == expected.tolist()
    assert refined.indices[:, 6:].tolist() == expected.sort(dim=1).values.tolist()


def test_a_delta_from_cached_factors_is_the_same() -> None:
    tokens = images(6, batch=3, grid=Grid(3, 4, tiles=3))
    policy = materialize(with_core({"share": 0.5}), 12)
    core = refine(core_policy(policy.state, policy.core), tokens).indices
    fresh, condition = give_core(policy, tokens, core), policy.base.condition
    assert condition is not None
    known = condition(policy.state.base_policy.params, tokens, fresh.indices)
    fresh_kept, other = (
        select_tokens(delta_policy(policy), tokens, start)
        for start in (fresh, replace(fresh, conditioned=known))
    )
    assert torch.equal(fresh_kept.indices, other.indices)


@pytest.mark.parametrize(
    ("base", "params"), [("cen_cdpruner", {"relevance": False}), ("mmtok", {"words": False})]
)
def test_the_core_of_a_policy_is_its_form_without_the_question(base: str, params: Changes) -> None:
    (tokens, *_) = synthetic_probes(12)
    changes: Changes = {"/base_policy": {"name": base}, **UNCHANGED}
    split = with_core({"share": 0.5, "policy": {"name": base}}, changes)
    silent = state({**changes, "/base_policy": {"name": base, "params": params}})
    core = refine(materialize(split, 12), tokens).indices[:, :6]
    assert torch.equal(core, refine(materialize(silent, 6), tokens).indices)
    asking = with_core({"share": 0.5, "policy": {"name": base, "params": params}}, changes)
    assert asking.digest == split.digest


def test_a_core_survives_json_and_pickling_and_its_digest_leaves_out_the_share() -> None:
    split = with_core(CORES["cover"])
    again = pickle.loads(pickle.dumps(split))
    assert again == split == load_state(split.dumps())
    assert again.digest == split.digest != state().digest
    assert '"core"' not in state().dumps()
    half, other, third = (
        with_core({"share": share, "cover": cover}).core_digest
        for share, cover in ((0.5, 0.0), (0.75, 0.0), (0.5, 0.5))
    )
    assert half == other != third


READERS = [name for name, policy in BASE_POLICIES.items() if policy.core is None]


@pytest.mark.parametrize(
    ("core", "where"),
    [
        ({}, "/core/share"),
        ({"share": 0}, "/core/share"),
        ({"share": 1.1}, "/core/share"),
        ({"share": 0.5, "cover": 1}, "/core/cover"),
        ({"share": 0.5, "size": 8}, "/core/size"),
        *(({"share": 0.5, "policy": {"name": name}}, "/core/policy/name") for name in READERS),
        ({"share": 0.5, "policy": {"name": "mmtok", "params": {"words": True}}},
         "/core/policy/params/words"),
    ],
)  # fmt: skip
def test_schema_and_loader_refuse_the_same(core: Changes, where: str) -> None:
    ((place, what),) = refused_with({"/core": core})
    assert place == where and not ACCEPTS(edited(sample(), {"/core": core}))
    assert ("reads the question" in what) == (where == "/core/policy/name")


@pytest.mark.parametrize(
    ("share", "budget", "core"), [(0.07, 100, 7), (0.5, 1, 0), (1.0, 8, 8), (0.75, 32, 24)]
)
def test_core_tokens_of_a_budget(share: float, budget: int, core: int) -> None:
    assert materialize(with_core({"share": share}), budget).core == core
    with pytest.raises(BudgetError, match=rf"{budget + 1} core tokens of K = {budget}"):
        materialize(with_core({"share": share}), budget, budget + 1)
