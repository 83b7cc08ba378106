"""States with a core: tokens of K that are kept for every question, and the delta given them."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tpdsl.samples import (
    BLEND,
    CORES,
    GRIDS,
    QUESTION_FREE,
    UNCHANGED,
    VARIANTS,
    accepts,
    assert_split,
    images,
    plain,
    refused_with,
    same,
    state,
    take,
    with_core,
)
from vllm_autoprune import (
    BudgetError,
    Grid,
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
from vllm_autoprune.tpdsl.tokens import NextLayer


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
    core: dict[str, object] = {"share": share, "cover": cover, "strength": 0.5}
    core_size = data.draw(st.integers(1, budget))
    policy = materialize(with_core(core, VARIANTS[variant]), budget, core_size)
    assert_split(policy, images(seed, grid=grid))


def test_the_core_depends_on_its_size_and_not_on_k() -> None:
    tokens = images(5)
    split = with_core({"share": 0.5, "cover": 0.5, "strength": 0.5}, BLEND)
    small, large = (refine(materialize(split, budget, 6), tokens) for budget in (8, 20))
    assert torch.equal(small.indices[:, :6], large.indices[:, :6])
    assert torch.equal(small.features[:, :6], large.features[:, :6])


@pytest.mark.parametrize("core", ["divprune", "cover"])
def test_results_do_not_depend_on_the_batch(core: str) -> None:
    for grid in GRIDS:
        tokens = images(5, batch=4, grid=grid)
        policy = materialize(with_core(CORES[core], BLEND), 9)
        together = refine(policy, tokens)
        for i in range(4):
            assert same(together, refine(policy, take(tokens, [i])), ([i], [0]))


def traceable(seed: int, grid: Grid) -> VisualTokens:
    """Images whose rows tell how much of every token is in them: column 16 + i is token i's."""
    tokens = images(seed, grid=grid)
    marks = torch.eye(tokens.count).expand(tokens.batch, -1, -1)
    return dataclasses.replace(tokens, features=torch.cat([tokens.features, marks], dim=2))


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
    changes = {**BLEND, "/base_policy": {"name": "visionzip"}}
    call = {"share": 0.5, "cover": cover, "strength": 0.5, "policy": {"name": core}}
    tokens = traceable(seed, grid)
    probe = synthetic_probes(grid.tokens // 2)[0]
    tower = probe.require_tower()
    wide = {"patches": tokens.features, "keys": tokens.features[:, :, :8]}
    following = NextLayer(torch.rand(2, grid.tokens), tokens.features)
    tower = dataclasses.replace(
        tower, **wide, project=lambda rows: rows, cls=None, next_layer=following
    )
    tokens = dataclasses.replace(tokens, tower=tower)
    policy = materialize(with_core(call, changes), budget)
    actual = refine(policy, tokens)
    within = actual.features[:, :, 16:].abs() > 0
    part = give_core(policy, tokens, actual.indices[:, : policy.core])
    if torch.equal(part.closed, part.covered):
        assert int(within.sum(dim=1).max()) <= 1
        assert bool(within.gather(2, actual.indices[:, :, None]).all())
    else:  # K leaves too few tokens outside the cover: the delta keeps some, and merges none
        assert policy.budget + int(cover * tokens.count) > tokens.count
        discarded = ~mask_from_indices(actual.indices, tokens.count)
        assert int((within.sum(dim=1) * discarded).max()) <= 1


def test_the_delta_neither_keeps_nor_merges_tokens_of_the_cover() -> None:
    tokens = traceable(7, Grid(6, 6))
    policy = materialize(with_core({"share": 0.5, "cover": 0.5, "strength": 0.5}, BLEND), 8)
    actual = refine(policy, tokens)
    for rows, indices in zip(actual.features[:, :, 16:], actual.indices, strict=True):
        by_core = (rows[:4] > 0).any(dim=0)
        assert int(by_core.sum()) == 18
        assert not bool(by_core[indices[4:]].any())
        by_delta = (rows[4:] > 0).any(dim=0)
        assert not bool((by_core & by_delta).any())


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
def test_no_selector_takes_a_token_of_the_core(selector: dict[str, object], cover: float) -> None:
    kernel = {"atom": "runtime_conditional_similarity_kernel"}
    changes = {"/constraints/selector": selector, "/scoring/kernel": kernel}
    policy = materialize(with_core({"share": 0.5, "cover": cover}, changes), 12)
    assert int(assert_split(policy, images(10, batch=3)).exchanged.max()) > 0


def test_an_exchange_takes_no_copy_of_a_core_token() -> None:
    """Token 3 copies token 0 of the core and has the highest quality, but is too similar to it."""
    features = torch.eye(4)[[0, 1, 2, 0]]
    tokens = dataclasses.replace(
        plain(features[None], Grid(2, 2)), cls_attention=torch.tensor([[0.5, 0.1, 0.2, 0.9]])
    )
    selector = {"atom": "reference_strict_margin_exchange_selector", "q_e": 1, "margin": 0.0}
    changes: dict[str, object] = {
        "/base_policy": {"name": "divprune"},
        "/scoring/signals": [{"atom": "attention_proxy_saliency"}],
        "/constraints/selector": selector,
        "/constraints/pool": [{"atom": "quality_pool_builder", "pool_ratio": 2.0}],
    }
    policy = materialize(state(changes), 1)
    closed = torch.tensor([[True, False, False, False]])
    core = Given(torch.tensor([[0]]), closed, closed, 1)
    assert select_tokens(policy, tokens, core).indices.tolist() != [[3]]


@pytest.mark.parametrize("base", ["prumerge_plus", "visionzip"])
def test_priors_see_the_whole_budget(base: str) -> None:
    """At K = 5 of 5 tiles the published code keeps a token of each, at K - K_c = 2 it fails."""
    changes: dict[str, object] = {
        "/base_policy": {"name": base},
        "/source": {"priors": [{"atom": "native_teacher_mask_prior"}]},
    }
    record = safety_check(materialize(with_core({"share": 0.7}, changes), 5))
    assert record.valid, record.failures()


class TestFallback:
    def test_an_image_that_cannot_be_read_keeps_evenly_spaced_tokens_in_both_parts(self) -> None:
        tokens = images(11)
        policy = materialize(with_core(CORES["cover"], BLEND), 8)
        clean = refine(policy, tokens)
        tokens = images(11)
        tokens.features[0, 3] = torch.nan
        actual = refine(policy, tokens)
        assert actual.fallback.tolist() == [2, 0]
        assert actual.indices[0].unique().numel() == 8
        assert bool(actual.features.isfinite().all())
        assert same(actual, clean, ([1], [1]))

    def test_a_question_that_cannot_be_read_leaves_the_core_as_it_is(self) -> None:
        tokens = images(11)
        policy = materialize(with_core(CORES["cover"], BLEND), 8)
        clean = refine(policy, tokens)
        tokens.require_instruction().text[0] = torch.nan
        actual = refine(policy, tokens)
        assert actual.fallback.tolist() == [2, 0]
        assert torch.equal(actual.features[:, :4], clean.features[:, :4])
        assert actual.indices[0].unique().numel() == 8

    @pytest.mark.parametrize("core", CORES)
    def test_the_reference_of_a_core_is_single_tokens_too(self, core: str) -> None:
        (tokens, *_) = synthetic_probes(12)
        policy = core_policy(with_core(CORES[core]), 6)
        actual = keep_reference(policy, tokens)
        assert actual.extra == 0 and actual.indices.shape[1] == policy.budget
        rows = gather_rows(tokens.features, actual.indices)
        assert torch.equal(actual.features, rows)


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


def test_a_core_survives_json_and_pickling() -> None:
    split = with_core(CORES["cover"])
    again = pickle.loads(pickle.dumps(split))
    assert again == split == load_state(split.dumps())
    assert again.digest == split.digest != state().digest
    assert '"core"' not in state().dumps()


def test_states_with_another_share_have_the_same_core() -> None:
    one, other, third = (
        with_core({"share": share, "cover": cover}).core
        for share, cover in ((0.5, 0.0), (0.75, 0.0), (0.5, 0.5))
    )
    assert one is not None and other is not None and third is not None
    assert one.digest == other.digest != third.digest


@pytest.mark.parametrize("base", sorted(set(BASE_POLICIES) - set(QUESTION_FREE)))
def test_a_core_policy_that_reads_the_question_is_refused(base: str) -> None:
    ((where, what),) = refused_with({"/core": {"share": 0.5, "policy": {"name": base}}})
    assert where == "/core/policy/name" and base in what
    assert "reads the question" in what
    assert not accepts({"share": 0.5, "policy": {"name": base}})


@pytest.mark.parametrize(
    "core",
    [{}, {"share": 0}, {"share": 1.1}, {"share": 0.5, "cover": 1}, {"share": 0.5, "size": 8}],
)
def test_schema_and_loader_refuse_the_same(core: dict[str, object]) -> None:
    assert refused_with({"/core": core})[0][0].startswith("/core")
    assert not accepts(core)


@pytest.mark.parametrize(
    ("share", "budget", "core"), [(0.07, 100, 7), (0.5, 1, 0), (1.0, 8, 8), (0.75, 32, 24)]
)
def test_core_tokens_of_a_budget(share: float, budget: int, core: int) -> None:
    assert materialize(with_core({"share": share}), budget).core == core


def test_a_core_of_more_than_k_tokens_is_refused() -> None:
    with pytest.raises(BudgetError, match="9 core tokens of K = 8"):
        materialize(with_core({"share": 0.5}), 8, 9)


CORE = {"share": 0.5, "cover": 0.25, "strength": 0.5}


def refined() -> RefinedTokens:
    changes = {
        "/constraints/selector/q_e": 0,
        "/reassembly": {"atom": "mean_residual", "strength": 0.5},
        "/core": CORE,
    }
    return refine(materialize(state(changes), 8), images(3))


def test_the_delta_merges_every_token_that_the_core_does_not_stand_for() -> None:
    tokens, kept = images(3), refined()
    own, delta = kept.indices[:, :4], kept.indices[:, 4:]
    covered = most_similar(tokens, own, int(CORE["cover"] * tokens.grid.per_tile))
    for image in range(tokens.batch):
        features, cosine = tokens.features[image].float(), tokens.cosine[image]
        owner = cosine[:, delta[image]].argmax(dim=1)
        free = ~covered[image]
        free[delta[image]] = False
        for row, token in enumerate(delta[image].tolist()):
            group = features[free & (owner == row)]
            expected = features[token]
            if len(group):
                expected = (expected + group.mean(dim=0)) / 2
            torch.testing.assert_close(kept.features[image, 4 + row].float(), expected)
