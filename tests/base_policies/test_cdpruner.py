from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.golden.case import Case, load, names
from tests.tpdsl.samples import images, plain, take, with_relevance
from vllm_autoprune import Grid, Instruction, SelectionError, VisualTokens
from vllm_autoprune.base_policies import cdpruner as under_test
from vllm_autoprune.base_policies.cdpruner import CDPrunerParams
from vllm_autoprune.tpdsl.tokens import split_over_tiles

AS_PUBLISHED = CDPrunerParams(theta=None)


def cdpruner(params: CDPrunerParams, tokens: VisualTokens, budget: int) -> Tensor:
    """Run CDPruner and return its picks, after a check that it merges nothing."""
    actual = under_test.cdpruner(params, tokens, budget)
    assert actual.merged is None and actual.extra is None
    return actual.picks


def relevance_of(tokens: VisualTokens) -> Tensor:
    """``(N,)`` relevance of the first image, as the paper's code makes it, in float64."""
    given = tokens.instruction
    assert given is not None
    patches, text = given.patches[0].double(), given.text[0][given.segments[0]].double()
    patches = patches / patches.norm(dim=-1, keepdim=True)
    text = text / text.norm(dim=-1, keepdim=True)
    raw = (given.sign * (patches @ text.T)).mean(dim=1)
    spread = raw.max() - raw.min()
    return torch.ones_like(raw) if spread < 1e-12 else (raw - raw.min() + 1e-6) / spread


def gains_before_each_pick(unit: Tensor, quality: Tensor, picks: list[int]) -> list[Tensor]:
    """``(n,)`` Determinant gain of every token, given the picks before, in float64.

    Straight from the definition: the gain of j is det(L[S + j]) / det(L[S]), here the squared
    length of what is left of q_j u_j outside the span of the vectors picked so far.
    """
    left = unit.double() * quality[:, None]
    actual = []
    for pick in picks:
        actual.append(left.square().sum(dim=1))
        direction = left[pick] / left[pick].norm()
        left = left - (left @ direction)[:, None] * direction
    return actual


def assert_greedy(tokens: VisualTokens, picks: list[int], quality: Tensor, until: float) -> int:
    """Each pick has the largest gain at its turn; returns how many were checked.

    Stops where every gain is below ``until``: single precision cannot tell those apart.
    """
    unit = tokens.unit[0].double()
    for turn, gain in enumerate(gains_before_each_pick(unit, quality, picks)):
        free = gain.clone()
        free[picks[:turn]] = -1
        best = float(free.max())
        if best <= until:
            return turn
        assert float(free[picks[turn]]) >= best * (1 - 1e-3) - 1e-6, f"pick {turn}"
    return len(picks)


def tokens_of(case: Case) -> VisualTokens:
    features = case.inputs["image_features"].to(case.dtype)
    tiles, count, width = features.shape
    patches = case.inputs["image_embeds"].reshape(1, tiles * count, -1)
    text = case.inputs["text_embeds"][None]
    used = torch.ones(text.shape[:2], dtype=torch.bool)
    grid = Grid(1, count, tiles)
    return VisualTokens(
        features.reshape(1, tiles * count, width),
        grid,
        instruction=Instruction(patches, text, used, sign=-1),
    )


def by_tile(picks: Tensor, grid: Grid) -> Tensor:
    """Interleaved picks ``(1, T k)`` as each tile's own picks ``(T, k)``."""
    own = picks.reshape(-1, grid.tiles).T
    return own - torch.arange(grid.tiles)[:, None] * grid.per_tile


@pytest.mark.parametrize("name", names("cdpruner"))
def test_picks_are_those_of_the_published_code(name: str) -> None:
    case = load(name)
    tokens, k = tokens_of(case), case.recipe["K"]
    order = by_tile(cdpruner(AS_PUBLISHED, tokens, k * tokens.grid.tiles), tokens.grid)
    expected = torch.from_numpy(case.expected["order"]).long()

    assert all(row.unique().numel() == k for row in order)
    if case.recipe["stable_order"] and not case.recipe["note"]:
        assert order.tolist() == expected.tolist()
    elif case.recipe["stable_set"]:
        assert order.sort().values.tolist() == expected.sort().values.tolist()
    else:
        # The published loop runs into NaN once the kernel has no rank left; before that it counts.
        picks = expected[0].tolist()
        gains = gains_before_each_pick(tokens.unit[0], relevance_of(tokens), order[0].tolist())
        sound = sum(bool(gain.max() > 1e-4) for gain in gains)
        assert sound >= 10
        assert order[0, :sound].tolist() == picks[:sound]


@pytest.mark.parametrize(("seed", "k"), [(1, 9), (2, 14), (3, 1)])
def test_every_pick_has_the_largest_gain_in_determinant(seed: int, k: int) -> None:
    tokens = images(seed, batch=1, width=24)
    picks = cdpruner(AS_PUBLISHED, tokens, k)[0].tolist()
    assert len(set(picks)) == k
    assert assert_greedy(tokens, picks, relevance_of(tokens), until=1e-4) == k


@pytest.mark.parametrize("theta", [0.0, 0.4, 0.9])
def test_theta_turns_relevance_into_exp_of_alpha_times_relevance(theta: float) -> None:
    tokens = images(4, batch=1, width=24)
    picks = cdpruner(CDPrunerParams(theta=theta), tokens, 10)[0].tolist()
    quality = torch.exp(theta / (2 * (1 - theta)) * relevance_of(tokens))
    assert assert_greedy(tokens, picks, quality, until=1e-4) == 10


@pytest.mark.parametrize("k", [3, 7, 10, 11, 14])
def test_tiles_share_the_budget_and_one_scale_of_relevance(k: int) -> None:
    grid = Grid(4, 4, tiles=3)
    tokens = images(5, batch=1, grid=grid, width=24)
    picks = cdpruner(AS_PUBLISHED, tokens, k)[0]
    # One scale over all tiles: normalising within a tile would give each the full range.
    quality = relevance_of(tokens)
    assert quality.min() < 1e-4 and quality.max() > 0.999
    for tile, share in enumerate(split_over_tiles(k, 3)):
        own = picks[picks // 16 == tile] % 16
        assert own.numel() == share
        rows = slice(16 * tile, 16 * (tile + 1))
        assert_greedy(plain(tokens.features[0, rows]), own.tolist(), quality[rows], until=1e-4)


def test_picks_alternate_between_tiles() -> None:
    picks = cdpruner(AS_PUBLISHED, images(6, batch=1, grid=Grid(4, 4, 3)), 8)[0]
    assert (picks // 16).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_smaller_budget_gives_the_first_picks_of_a_larger_one() -> None:
    tokens = images(7, grid=Grid(4, 4, 3))
    large = cdpruner(AS_PUBLISHED, tokens, 13)
    assert all(torch.equal(cdpruner(AS_PUBLISHED, tokens, k), large[:, :k]) for k in range(1, 13))


def test_constant_relevance_selects_by_diversity_only() -> None:
    tokens = images(8, batch=1, width=24)
    flat = with_relevance(tokens, torch.full((1, 36), 0.3))
    picks = cdpruner(AS_PUBLISHED, flat, 12)[0].tolist()
    assert assert_greedy(tokens, picks, torch.ones(36, dtype=torch.float64), until=1e-4) == 12


def test_the_published_1e_6_lifts_the_least_relevant_off_zero_where_cosines_hardly_differ() -> None:
    # Cosines 1e-6, 1e-6, 0: with the offset the last has relevance 1 of 2, without it none at all,
    # and then the second token would be next although it nearly repeats the first.
    tokens = dataclasses.replace(
        plain(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])),
        instruction=Instruction(
            patches=torch.tensor([[[1e-6, 1.0], [1e-6, 1.0], [0.0, 1.0]]]),
            text=torch.tensor([[[1.0, 0.0]]]),
            segments=torch.ones(1, 1, dtype=torch.bool),
            sign=1,
        ),
    )
    assert cdpruner(AS_PUBLISHED, tokens, 2).tolist() == [[0, 2]]


def test_no_instruction_is_constant_relevance() -> None:
    tokens = images(9)
    given = tokens.instruction
    assert given is not None
    nothing = dataclasses.replace(given, segments=torch.zeros_like(given.segments))
    silent = dataclasses.replace(tokens, instruction=nothing)
    flat = with_relevance(tokens, torch.full((2, 36), 0.3))
    assert torch.equal(cdpruner(AS_PUBLISHED, silent, 9), cdpruner(AS_PUBLISHED, flat, 9))


def test_sign_decides_whether_high_or_low_cosine_is_relevant() -> None:
    features = torch.eye(8)
    cosine = torch.linspace(-0.7, 0.7, 8)[None]
    towards = cdpruner(AS_PUBLISHED, with_relevance(plain(features), cosine, sign=1), 4)
    away = cdpruner(AS_PUBLISHED, with_relevance(plain(features), cosine, sign=-1), 4)
    assert towards.tolist() == [[7, 6, 5, 4]]
    assert away.tolist() == [[0, 1, 2, 3]]


def test_relevance_is_the_mean_over_segments_and_padding_does_not_count() -> None:
    tokens = images(10, segments=3)
    given = tokens.instruction
    assert given is not None
    text = torch.cat([given.text, torch.full((2, 2, 8), torch.nan)], dim=1)
    used = torch.tensor([True, True, True, False, False]).expand(2, -1)
    padded = dataclasses.replace(given, text=text, segments=used)
    picks = cdpruner(AS_PUBLISHED, dataclasses.replace(tokens, instruction=padded), 12)
    assert torch.equal(picks, cdpruner(AS_PUBLISHED, tokens, 12))


def test_duplicates_are_picked_last() -> None:
    distinct = images(11, batch=1, grid=Grid(3, 3), noise=1.0)
    twice = with_relevance(
        plain(distinct.features.repeat(1, 2, 1)), torch.linspace(0, 0.9, 9).repeat(1, 2)
    )
    picks = cdpruner(AS_PUBLISHED, twice, 14)[0]
    assert picks.unique().numel() == 14
    assert (picks[:8] % 9).unique().numel() == 8


def test_picks_beyond_the_kernel_rank_are_by_relevance() -> None:
    tokens = with_relevance(plain(torch.eye(3).repeat(4, 1)), torch.linspace(-0.9, 0.9, 12)[None])
    # Three directions exist: their most relevant tokens are 9, 10 and 11.
    assert cdpruner(AS_PUBLISHED, tokens, 8).tolist() == [[11, 10, 9, 8, 7, 6, 5, 4]]


def test_identical_tokens_give_k_picks() -> None:
    tokens = with_relevance(plain(torch.ones(2, 20, 4)), torch.zeros(2, 20))
    assert cdpruner(AS_PUBLISHED, tokens, 6).tolist() == [[0, 1, 2, 3, 4, 5]] * 2


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_input_repeats_no_index(poison: float) -> None:
    tokens = images(12, grid=Grid(4, 4, 3))
    tokens.features[0, 5] = poison
    assert tokens.instruction is not None
    tokens.instruction.patches[1, 7] = poison
    picks = cdpruner(AS_PUBLISHED, tokens, 20)
    assert all(row.unique().numel() == 20 for row in picks)
    assert picks.min() >= 0 and picks.max() < 48


def test_images_of_a_batch_are_independent() -> None:
    tokens = images(13, batch=3, grid=Grid(4, 4, 2))
    together = cdpruner(AS_PUBLISHED, tokens, 9)
    alone = torch.cat([cdpruner(AS_PUBLISHED, take(tokens, [i]), 9) for i in range(3)])
    assert torch.equal(together, alone)


def test_missing_instruction_is_named_in_the_error() -> None:
    with pytest.raises(SelectionError, match=r"VisualTokens\.instruction is None"):
        cdpruner(AS_PUBLISHED, plain(torch.eye(4)), 2)
