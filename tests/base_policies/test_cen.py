"""Cen-DivPrune and Cen-CDPruner against plain loops in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.base_policies.samples import images, select
from tests.tpdsl.samples import images as plain_images
from tests.tpdsl.samples import plain, with_relevance
from vllm_autoprune import Grid, VisualTokens
from vllm_autoprune.base_policies.cdpruner import normalised_relevance
from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, Given


def geometry(rows: Tensor, *, scale: bool = False, curve: str = "minmax") -> tuple[Tensor, Tensor]:
    """Centred cosines and weights of rows ``(n, D)``, from the definition in float64."""
    rows = rows.double()
    if scale:
        rows = rows / ((rows - rows.mean(dim=0)).square().mean(dim=0) + 1e-6).sqrt()
    unit = rows / rows.norm(dim=1, keepdim=True)
    cosines = unit @ unit.T
    g = -(cosines.sum(dim=1) - cosines.diagonal()) / (len(rows) - 1)
    centred = rows - rows.mean(dim=0)
    centred = centred / centred.norm(dim=1, keepdim=True)
    if curve == "minmax":
        weight = (g - g.min()) / (g.max() - g.min() + 1e-6)
    else:
        weight = torch.sigmoid((g - g.mean()) / (g.std(unbiased=False) + 1e-6))
    return centred @ centred.T, weight


def spread(similarity: Tensor, weight: Tensor, count: int, kept: tuple[int, ...] = ()) -> list[int]:
    """Weighted farthest points, one at a time; the first without a weight."""
    distance = (1 - similarity).tolist()
    chosen = list(kept)
    everyone = range(len(distance))
    while len(chosen) < count + len(kept):
        left = [i for i in everyone if i not in chosen]
        if chosen:
            score = {i: float(weight[i]) * min(distance[i][c] for c in chosen) for i in left}
        else:
            score = {i: min(distance[i][j] for j in everyone if j != i) for i in left}
        chosen.append(max(left, key=lambda i: (score[i], -i)))
    return chosen[len(kept) :]


def determinant_gains(similarity: Tensor, quality: Tensor, picks: list[int]) -> list[Tensor]:
    """Gain in determinant of every token before each pick: det(L[S + j]) / det(L[S])."""
    kernel = quality[:, None] * similarity * quality
    gains = []
    for turn in range(len(picks)):
        chosen = picks[:turn]
        inner = torch.linalg.det(kernel[chosen][:, chosen]) if chosen else torch.tensor(1.0)
        own = [[*chosen, j] for j in range(len(kernel))]
        gains.append(torch.stack([torch.linalg.det(kernel[s][:, s]) / inner for s in own]))
    return gains


def continued(
    name: str, tokens: VisualTokens, kept: Tensor, count: int, **params: object
) -> Tensor:
    """Picks of a policy given kept tokens."""
    policy = BASE_POLICIES[name]
    call = policy.call.model_validate({"name": name, "params": params})
    closed = mask_from_indices(kept, tokens.count)
    given = Given(kept, closed, closed, kept.shape[1])
    return policy.select_given(call.params, tokens, count, given)


@pytest.mark.parametrize("curve", ["minmax", "sigmoid"])
@pytest.mark.parametrize("scale", [False, True])
def test_cen_divprune_is_weighted_farthest_points(curve: str, scale: bool) -> None:
    tokens = plain_images(1, noise=1.0)
    shifted = plain(tokens.features + 2.0, tokens.grid)
    picks = select("cen_divprune", shifted, 11, weight=curve, scale_variance=scale).picks
    for image, own in zip(shifted.features, picks, strict=True):
        assert own.tolist() == spread(*geometry(image, scale=scale, curve=curve), 11)


def test_each_tile_has_its_own_mean_and_weights() -> None:
    tokens = plain_images(2, batch=1, grid=Grid(4, 4, tiles=3), noise=1.0)
    picks = select("cen_divprune", tokens, 8).picks[0]
    for tile, share in enumerate((3, 3, 2)):
        own = picks[picks // 16 == tile] % 16
        rows = tokens.features[0, 16 * tile : 16 * tile + 16]
        assert own.tolist() == spread(*geometry(rows), share)


def test_global_scope_sees_one_set_of_tokens() -> None:
    tokens = plain_images(3, batch=1, grid=Grid(4, 4, tiles=3), noise=1.0)
    picks = select("cen_divprune", tokens, 9, tile_scope="global").picks[0]
    assert picks.tolist() == spread(*geometry(tokens.features[0]), 9)


def test_a_token_common_to_all_tokens_does_not_matter_to_the_distance() -> None:
    """Without centring a large shared vector hides all differences."""
    tokens = plain_images(4, batch=1, noise=1.0)
    shifted = plain(tokens.features + 50.0, tokens.grid)
    with_mean, without = (
        select("cen_divprune", one, 9, weight="none").picks for one in (shifted, tokens)
    )
    assert torch.equal(with_mean, without)
    assert not torch.equal(
        select("cen_divprune", shifted, 9, weight="none", centre=False).picks,
        select("cen_divprune", tokens, 9, weight="none", centre=False).picks,
    )


def test_the_least_unusual_token_comes_last() -> None:
    tokens = plain_images(5, batch=1, noise=1.0)
    _, weight = geometry(tokens.features[0])
    picks = select("cen_divprune", tokens, 35).picks[0].tolist()
    assert int(weight.argmin()) not in picks[:34]


def test_duplicates_come_by_weight_once_every_kind_is_picked() -> None:
    rows = plain_images(6, batch=1, noise=1.0).features[0, :6]
    tokens = plain(torch.cat([rows, rows]))
    picks = select("cen_divprune", tokens, 10, weight="none").picks[0]
    assert sorted((picks[:6] % 6).tolist()) == [0, 1, 2, 3, 4, 5]
    assert picks[6:].tolist() == sorted(picks[6:].tolist()), "equal weights come by index"


def test_cen_divprune_continues_from_given_tokens() -> None:
    tokens = plain_images(7, noise=1.0)
    kept = torch.tensor([[3, 20, 9], [30, 1, 2]])
    actual = continued("cen_divprune", tokens, kept, 6)
    for image, own, first in zip(tokens.features, actual, kept, strict=True):
        assert own.tolist() == spread(*geometry(image), 6, tuple(first.tolist()))


@pytest.mark.parametrize("relevance", [True, False])
def test_every_pick_of_cen_cdpruner_has_the_largest_gain(relevance: bool) -> None:
    tokens = plain_images(8, batch=1, width=24)
    picks = select("cen_cdpruner", tokens, 9, relevance=relevance).picks[0].tolist()
    similarity, quality = geometry(tokens.features[0])
    if relevance:
        quality = quality * normalised_relevance(tokens)[0].double()
    for turn, gain in enumerate(determinant_gains(similarity, quality, picks)):
        gain[picks[:turn]] = -1
        assert float(gain[picks[turn]]) >= float(gain.max()) * (1 - 1e-3), turn


def test_a_delta_by_relevance_continues_a_core_without_it() -> None:
    """The core's residuals, then the gains with relevance: the order of the definition."""
    tokens = plain_images(9, batch=1, width=24)
    core = select("cen_cdpruner", tokens, 4, relevance=False).picks
    delta = continued("cen_cdpruner", tokens, core, 4)[0].tolist()
    similarity, quality = geometry(tokens.features[0])
    quality = quality * normalised_relevance(tokens)[0].double()
    every = [*core[0].tolist(), *delta]
    for turn, gain in enumerate(determinant_gains(similarity, quality, every)[4:], 4):
        gain[every[:turn]] = -1
        assert float(gain[every[turn]]) >= float(gain.max()) * (1 - 1e-3), turn


def test_a_form_without_relevance_needs_no_question() -> None:
    tokens = images(10)
    silent = replace(tokens, instruction=None)
    picks = select("cen_cdpruner", silent, 8, relevance=False).picks
    assert torch.equal(picks, select("cen_cdpruner", tokens, 8, relevance=False).picks)


def test_relevance_decides_between_tokens_that_are_equally_unusual() -> None:
    tokens = plain(torch.eye(8))
    towards = with_relevance(tokens, torch.linspace(-0.7, 0.7, 8)[None], sign=1)
    assert select("cen_cdpruner", towards, 3).picks.tolist() == [[7, 6, 5]]
