"""Algorithm 1: images, a state at K, fallbacks, a core and its delta, ranking before the merger.

What holds of every selection is in ``test_properties.py``. Fallback codes: 0 none, 1 the reference
selection, 2 an even spread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.tables import parametrize_from_file
from tests.tpdsl.samples import (
    BLEND,
    IN,
    UNCHANGED,
    Changes,
    call,
    images,
    plain,
    state,
)
from tests.tpdsl.soundness import GRIDS, ODD_GRIDS, same
from vllm_autoprune import (
    BudgetError,
    Grid,
    SelectionError,
    VisualTokens,
    load_state,
    materialize,
    refine,
)
from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.ops.rowwise import (
    gather_rows,
    mask_from_indices,
    min_max_normalise,
)
from vllm_autoprune.tpdsl.atoms.source import MAX_BUDGET, PriorInputs
from vllm_autoprune.tpdsl.refine import (
    _evenly_spaced,
    give_core,
    keep_indices,
    keep_reference,
    keep_unmerged,
    pool_tokens,
    select_evenly,
)
from vllm_autoprune.tpdsl.registry import AtomCall, run
from vllm_autoprune.tpdsl.tokens import TowerStates, Words, split_over_tiles

DIVPRUNE: Changes = {"/base_policy": {"name": "divprune"}}
EVENLY: list[int] = _evenly_spaced(1, 36, 8, torch.device("cpu"))[0].tolist()

# Images.


@pytest.mark.parametrize("shape", [(4, 8), (1, 5, 8)])
def test_features_must_fit_the_grid(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        SelectionError, match=r"has shape .* N = 4 of the grid 2 x 2 x 1 tiles"
    ):
        VisualTokens(torch.zeros(shape), Grid(2, 2))


@pytest.mark.parametrize("informative", range(5))
@pytest.mark.parametrize("base", ["divprune", "cen_divprune", "scope"])
@pytest.mark.parametrize("core", [0.0, 0.5])
def test_free_shares_follow_the_tile_that_shows_something(
    informative: int, base: str, core: float
) -> None:
    """Of five tiles four show one colour; equal shares keep K / T of each whatever it shows."""
    source = torch.Generator().manual_seed(informative)
    features = torch.ones(5, 16, 8) + 1e-3 * torch.randn(5, 16, 8, generator=source)
    features[informative] = torch.randn(16, 8, generator=source)
    attention = torch.full((5, 16), 0.01)
    attention[informative] = 0.05
    tokens = plain(features.flatten(0, 1), Grid(4, 4, tiles=5))
    attention = attention.flatten()[None]
    tokens = replace(tokens, cls_attention=attention, encoder=tokens.features)
    changes = {**UNCHANGED, "/base_policy": {"name": base}}
    if core:
        changes["/core"] = {"share": core}
    kept = {
        shares: refine(
            materialize(state({**changes, "/shares": shares}), 10), tokens
        ).indices[0]
        for shares in ("equal", "free")
    }
    counts = {
        shares: (indices // 16).bincount(minlength=5)
        for shares, indices in kept.items()
    }
    assert counts["equal"].tolist() == [2] * 5
    assert counts["free"][informative] >= 8
    if base == "divprune" and not core:
        across = {"name": base, "params": {"tile_scope": "global"}}
        policy = materialize(state({**changes, "/base_policy": across}), 10)
        assert torch.equal(refine(policy, tokens).indices[0], kept["free"])


def test_cosines_that_are_known_are_not_computed() -> None:
    policy = materialize(load_state("autoprune"), 8)
    three = images(batch=3)
    cosine = three.cosine.clone()
    known = replace(three, known_cosine=lambda: cosine)
    assert known.cosine is cosine
    assert torch.equal(refine(policy, known).indices, refine(policy, three).indices)


def test_nested_picks_interleave_by_rank_and_the_last_tiles_drop_their_last() -> None:
    picks = torch.tensor([[5, 0], [4, 1], [3, 2]])
    image = plain(torch.eye(18), Grid(2, 3, 3))
    assert image.join_tiles(picks, (2, 1, 1)).tolist() == [[5, 10, 15, 0]]


# A state at K.


@parametrize_from_file("parameters", "budget", "bounds")
def test_the_quota_is_what_r_min_leaves(
    parameters: Changes, budget: int, bounds: list[int]
) -> None:
    selector = call("reference_residual_exchange_selector", **parameters)
    assert [*selector.bounds(budget)] == bounds


def test_a_budget_that_follows_the_image_is_resolved_for_its_size() -> None:
    ratio: Changes = {
        "/budget": {"atom": "ratio_budget", "ratio": 0.25, "floor": 4, "ceiling": 64}
    }
    policy = materialize(state(ratio))
    assert (policy.by_size, policy.budget) == (policy.state.budget, 64)
    assert policy.at(100) == materialize(state(ratio), 25)
    assert [policy.tokens_kept(n) for n in (3, 8, 100, 5000)] == [3, 4, 25, 64]
    fixed = materialize(state(ratio), 10)
    assert (
        fixed.by_size is None
        and fixed.at(576) is fixed
        and fixed.tokens_kept(576) == 10
    )
    chosen = state({"/budget/limit": 64, "/constraints/selector/r_min": 16})
    assert [materialize(chosen, k).budget for k in (16, 64)] == [16, 64]
    assert materialize(state(), MAX_BUDGET).budget == MAX_BUDGET


@parametrize_from_file("changes", "budget", "where", "fix")
def test_a_budget_that_is_refused(
    changes: Changes, budget: Any, where: str, fix: str
) -> None:
    with pytest.raises(BudgetError, match="'sample'") as raised:
        materialize(state(changes), budget)
    (problem,) = raised.value.problems
    assert (problem.where, problem.fix) == (where, fix) and repr(budget) in problem.what


SILENT: Changes = {
    **DIVPRUNE,
    **{f"/scoring/signals/{i}/weight": 0.0 for i in range(5)},
}


def prior(weight: float) -> Changes:
    return {
        "/source": {
            "priors": [
                {"atom": "external_policy", "policy": "cdpruner", "weight": weight}
            ]
        }
    }


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, {"instruction", "cls_attention"}),
        (
            UNCHANGED,
            {"instruction"},
        ),  # without exchange only the base policy reads anything
        ({**DIVPRUNE, "/scoring/signals/0/weight": 0.0}, {"cls_attention"}),
        (SILENT, set()),
        ({**SILENT, **prior(0.0)}, set()),
        ({**SILENT, **prior(0.1)}, {"instruction"}),
        (IN, {"instruction", "cls_attention", "encoder", "merger_input"}),
        ({"/core": {"share": 1.0}}, set()),
        ({"/core": {"share": 1.0}, **IN}, {"encoder", "merger_input"}),
    ],
)
def test_a_policy_needs_what_it_reads(changes: Changes, needs: set[str]) -> None:
    policy = materialize(state(changes))
    assert policy.needs == needs and policy.reads_instruction == (
        "instruction" in needs
    )


# Images that are kept whole, or have too little to select by.


@pytest.mark.parametrize("budget", [36, 640])
def test_k_of_n_or_more_keeps_every_token_as_it_is(budget: int) -> None:
    tokens = images(3, dtype=torch.float16)
    tokens.features[0, 3] = torch.nan
    policies = [materialize(state(changes), budget) for changes in ({}, BLEND, IN)]
    refined = [refine(policy, tokens) for policy in policies]
    for kept in (*refined, keep_reference(policies[0], tokens)):
        assert (
            kept.features is tokens.features
            and kept.indices.tolist() == [[*range(36)]] * 2
        )
        assert kept.exchanged.tolist() == kept.fallback.tolist() == [0, 0]


@pytest.mark.parametrize("changes", [{}, DIVPRUNE])
def test_an_image_without_instruction_is_pruned_like_any_other(
    changes: Changes,
) -> None:
    tokens = images(2)
    policy = materialize(state(changes), 8)
    instruction = tokens.require_instruction()
    used = instruction.segments.clone()
    unread = instruction.text.clone()
    used[0], unread[0] = False, torch.nan
    silent = replace(tokens, instruction=replace(instruction, segments=used))
    refined = refine(policy, silent)
    assert (
        refined.fallback.tolist() == [0, 0] and refined.indices[0].unique().numel() == 8
    )
    assert same(refined, refine(policy, tokens), 1, 1)
    # What its text rows hold does not matter, as none of them is a segment.
    other = replace(instruction, segments=used, text=unread)
    assert same(refined, refine(policy, replace(tokens, instruction=other)))
    with pytest.raises(SelectionError, match=r"reads the instruction.*fill it"):
        refine(policy, plain(torch.randn(2, 20, 4)))


def test_the_reference_selection_is_kept_unmerged() -> None:
    tokens = images(5)
    policy = materialize(state({"/reassembly/strength": 0.5}), 8)
    reference = keep_reference(policy, tokens)
    assert torch.equal(reference.reference, refine(policy, tokens).reference)
    assert torch.equal(reference.indices, reference.reference.sort(dim=1).values)
    rows = gather_rows(tokens.features, reference.indices)
    assert torch.equal(reference.features, rows)
    assert reference.fallback.tolist() == [1, 1]
    assert reference.exchanged.tolist() == [0, 0]


def test_an_even_spread_needs_no_inputs() -> None:
    unreadable = plain(torch.full((2, 36, 4), torch.nan))
    spread = keep_unmerged(unreadable, select_evenly(8, unreadable))
    assert spread.indices.tolist() == [EVENLY, EVENLY]
    assert bool((spread.features == 0).all())
    assert spread.fallback.tolist() == [2, 2]
    assert spread.exchanged.tolist() == [0, 0]


def test_indices_are_kept_in_the_order_of_the_image() -> None:
    tokens = images(5)
    refined = keep_indices(tokens, torch.tensor([[9, 2, 30], [0, 35, 1]]))
    assert refined.indices.tolist() == [[2, 9, 30], [0, 1, 35]]
    assert torch.equal(refined.features, gather_rows(tokens.features, refined.indices))
    assert refined.fallback.tolist() == [0, 0]


INPUTS: dict[str, Callable[[VisualTokens], Tensor]] = {
    "features": lambda tokens: tokens.features,
    "attention": lambda tokens: tokens.require_cls_attention()[:, :, None],
    "patches": lambda tokens: tokens.require_instruction().patches,
    "text": lambda tokens: tokens.require_instruction().text,
    "tower": lambda tokens: tokens.require_tower().patches,
    "encoder": lambda tokens: tokens.require_encoder(),
}
TOWER: Changes = {
    **DIVPRUNE,
    "/scoring/signals": [{"atom": "spatial_centrality_prior"}],
    "/source": {"tokens": {"atom": "vision_tokens@vision_tower"}},
}


@pytest.mark.parametrize(
    ("changes", "name", "code"),
    [
        ({}, "attention", 1),
        (DIVPRUNE, "attention", 1),
        *(
            (changes, name, 2)
            for changes in ({}, UNCHANGED)
            for name in ("patches", "text", "features")
        ),
        *((DIVPRUNE, name, 1) for name in ("patches", "text")),
        (TOWER, "tower", 1),
        (IN, "encoder", 2),
        (IN, "features", 2),
        # Inputs that are not read may hold anything.
        (UNCHANGED, "attention", 0),
        ({**DIVPRUNE, **UNCHANGED}, "text", 0),
    ],
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_kept_of_an_image_with_an_input_that_is_not_finite(
    changes: Changes, name: str, code: int, value: float
) -> None:
    policy = materialize(state(changes), 8)
    tokens = images(1)
    clean = images(1)
    INPUTS[name](tokens)[1, 0] = value
    refined = refine(policy, tokens)
    expected = refine(policy, clean)
    assert refined.fallback.tolist() == [0, code] and same(refined, expected, 0, 0)
    kept = {0: expected.indices, 1: expected.reference.sort(dim=1).values}.get(code)
    assert refined.indices[1].tolist() == (EVENLY if kept is None else kept[1].tolist())
    assert code == 2 or torch.equal(refined.reference, expected.reference)


# Pooling, the control that replaces the tokens of an image by means of cells.


@pytest.mark.parametrize(
    ("values", "grid", "budget", "means"),
    [
        # Each cell is one and a half tokens wide.
        ([3.0, 6, 9], Grid(1, 3), 2, [4.0, 8]),
        ([0.0] * 4 + [1] * 4 + [2] * 4, Grid(2, 2, tiles=3), 4, [0.0, 0, 1, 2]),
        # About as high as wide: bands of 3, 3 and 2 cells.
        (
            [float(i // 12 // 4) for i in range(144)],
            Grid(12, 12),
            8,
            [0.0] * 3 + [1] * 3 + [2] * 2,
        ),
    ],
)
def test_cells_by_hand(
    values: list[float], grid: Grid, budget: int, means: list[float]
) -> None:
    pooled = pool_tokens(budget, plain(torch.tensor(values)[:, None], grid))
    assert pooled.features.flatten().tolist() == pytest.approx(means)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.data())
def test_cells_weigh_one_in_all_and_their_centres_are_unique(
    height: int, width: int, tiles: int, data: st.DataObject
) -> None:
    grid = Grid(height, width, tiles)
    budget = data.draw(st.integers(1, grid.tokens))
    pooled = pool_tokens(budget, VisualTokens(torch.ones(2, grid.tokens, 1), grid))
    assert torch.allclose(pooled.features, torch.ones(2, budget, 1), atol=1e-5)
    assert (pooled.indices.diff(dim=1) > 0).all()
    assert ((pooled.indices >= 0) & (pooled.indices < grid.tokens)).all()
    shares = split_over_tiles(budget, tiles)
    assert (
        len(shares) == tiles
        and sum(shares) == budget
        and shares[0] - shares[-1] in (0, 1)
    )


# A core, and the delta given it.


@pytest.mark.parametrize(
    ("share", "budget", "core"),
    [(0.07, 100, 7), (0.5, 1, 0), (1.0, 8, 8), (0.75, 32, 24)],
)
def test_core_tokens_of_a_budget(share: float, budget: int, core: int) -> None:
    split = state({"/core": {"share": share}})
    assert materialize(split, budget).core == core
    with pytest.raises(BudgetError, match=rf"{budget + 1} core tokens of K = {budget}"):
        materialize(split, budget, budget + 1)
    with pytest.raises(BudgetError, match="'sample' has none"):
        materialize(state(), budget, 1)


@parametrize_from_file("changes", "part", "core", "bounds")
def test_each_part_of_an_image_has_its_budget_quota_and_core(
    changes: Changes, part: Any, core: int | None, bounds: list[int]
) -> None:
    chosen = state({"/constraints/selector/q_e": 2, **changes})
    policy = materialize(chosen, 8, core, part=part)
    assert [policy.budget, policy.quota, policy.r_min, policy.core] == bounds


def test_rows_of_an_unreadable_image_are_not_merged() -> None:
    policy = materialize(state({"/base_policy": {"name": "prumerge_plus"}}), 8)
    tokens = images(1)
    tokens.features[1, 0] = torch.nan
    refined = refine(policy, tokens)
    assert refined.fallback.tolist() == [0, 2]
    rows = gather_rows(tokens.features, refined.indices)[1]
    single = refined.features[1, : len(rows)]
    assert torch.equal(single, rows.nan_to_num(nan=0.0))


def test_a_prior_of_the_delta_counts_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its K and its picks are those of the whole image, given tokens first."""
    inputs = list[PriorInputs]()

    def record(kind: type[Any], call: AtomCall, value: object) -> Any:
        if isinstance(value, PriorInputs):
            inputs.append(value)
        return run(kind, call, value)

    monkeypatch.setattr("vllm_autoprune.tpdsl.refine.run", record)
    policy = materialize(state({**prior(0.5), "/core": {"share": 0.5}}), 12)
    refined = refine(policy, images(6))
    assert [entry.budget for entry in inputs] == [12]
    assert torch.equal(inputs[0].picks[:, :6], refined.indices[:, :6])


@given(
    seed=st.integers(0, 10_000),
    grid=st.sampled_from([*GRIDS, *ODD_GRIDS]),
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
    layer = tokens.require_next_layer()
    tower = TowerStates(
        rows, rows[:, :, :8], lambda rows: rows, next_layer=replace(layer, keys=rows)
    )
    tokens = replace(tokens, features=rows, tower=tower)
    chosen: Changes = {
        "share": 0.5,
        "cover": cover,
        "strength": 0.5,
        "policy": {"name": core},
    }
    split = state({**BLEND, "/base_policy": {"name": "visionzip"}, "/core": chosen})
    policy = materialize(split, budget)
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


def test_the_delta_of_cdpruner_is_greedy_map_with_the_core_as_anchors() -> None:
    tokens = images(6, batch=3)
    policy = materialize(state({**UNCHANGED, "/core": {"share": 0.5}}), 12)
    refined = refine(policy, tokens)
    relevance = min_max_normalise(tokens.require_instruction().relevance(), 1e-6)
    expected = greedy_map(tokens.cosine, relevance, 12, anchors=refined.indices[:, :6])[
        :, 6:
    ]
    assert refined.reference[:, 6:].tolist() == expected.tolist()
    assert refined.indices[:, 6:].tolist() == expected.sort(dim=1).values.tolist()


# Ranking before the merger: by the encoder's tokens, rows after it.


@parametrize_from_file("changes")
def test_policies_signals_kernels_and_cores_compare_the_tokens_before_the_merger(
    changes: Changes,
) -> None:

    def ranked(tokens: VisualTokens) -> VisualTokens:
        """Images that have nothing but the tokens before the merger."""
        return replace(
            tokens, features=tokens.require_encoder(), encoder=None, merger_input=None
        )

    tokens = images(grid=Grid(3, 4, tiles=3))
    before, after = (materialize(state({**changes, **place}), 12) for place in (IN, {}))
    kept = refine(before, tokens)
    alone = refine(after, ranked(tokens))
    assert torch.equal(kept.indices, alone.indices)
    assert kept.exchanged.tolist() == alone.exchanged.tolist()
    assert not torch.equal(kept.indices, refine(after, tokens).indices)
    if after.core:
        core = refine(materialize(before.state, 6, part="core"), tokens)
        assert torch.equal(kept.indices[:, :6], core.indices)
    # The reference selection too.
    reference = keep_reference(before, tokens)
    unchanged = refine(materialize(before.state, 12, exchange=False), tokens)
    assert after.core or torch.equal(reference.indices, unchanged.indices)


def test_words_are_compared_with_tokens_after_the_merger_and_norms_are_those_of_patches() -> (
    None
):
    tokens = images()
    wanted = [3, 8, 20, 31]
    # Every word is one token's own row, so that covering words means keeping these tokens.
    words = Words(tokens.features[:, wanted], torch.ones(2, 4, dtype=torch.bool))
    mmtok = {"name": "mmtok", "params": {"alpha": 0.0, "tau_text": 0.005}}
    policy = materialize(state({**UNCHANGED, **IN, "/base_policy": mmtok}), 4)
    assert refine(policy, replace(tokens, words=words)).indices.tolist() == [wanted] * 2
    for p in (1, 2):
        signals = [{"atom": "visual_token_norm_saliency", "p": p}]
        top = {"atom": "quality_topk_selector"}
        changes = {"/scoring/signals": signals, "/constraints/selector": top, **IN}
        best = (
            tokens.require_merger_input()
            .norms[:, :, p - 1]
            .topk(9)
            .indices.sort(dim=1)
            .values
        )
        assert torch.equal(refine(materialize(state(changes), 9), tokens).indices, best)


def test_a_backbone_without_a_merger_is_refused() -> None:
    without = replace(images(), merger_input=None)
    for tokens in (without, replace(without, encoder=None)):
        with pytest.raises(
            SelectionError, match=r"rank_at: merger_in.*without a merger"
        ):
            refine(materialize(state(IN), 9), tokens)
