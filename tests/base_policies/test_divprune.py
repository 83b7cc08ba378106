from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.golden.case import load, names
from tests.tpdsl.samples import images, plain, take
from vllm_autoprune import Grid, VisualTokens
from vllm_autoprune.base_policies import divprune as under_test
from vllm_autoprune.base_policies.divprune import DivPruneParams

PER_TILE = DivPruneParams(tile_scope="per_tile")
GLOBAL = DivPruneParams(tile_scope="global")


def divprune(params: DivPruneParams, tokens: VisualTokens, budget: int) -> Tensor:
    """Run DivPrune and return its picks, after a check that it merges nothing."""
    actual = under_test.divprune(params, tokens, budget)
    assert actual.merged is None and actual.extra is None
    return actual.picks


def published(features: Tensor, k: int) -> list[int]:
    """The published loop in float64, with chosen tokens left out."""
    unit = features.double() / features.double().norm(dim=1, keepdim=True)
    distance = (1 - unit @ unit.T).tolist()
    everyone = range(len(distance))
    chosen: list[int] = []
    for _ in range(k):
        if chosen:
            score = {i: min(distance[i][c] for c in chosen) for i in everyone if i not in chosen}
        else:
            score = {i: sorted(distance[i])[1] for i in everyone}
        chosen.append(max(score, key=lambda i: (score[i], -i)))
    return chosen


@pytest.mark.parametrize("name", names("divprune"))
def test_picks_are_those_of_the_published_code(name: str) -> None:
    case = load(name)
    features = case.inputs["features"].to(case.dtype)
    k, expected = case.recipe["K"], case.expected["order"].tolist()
    order = divprune(PER_TILE, plain(features), k)[0].tolist()

    assert len(set(order)) == k
    if case.recipe["stable_order"]:
        assert order == expected
    else:
        # Only 36 tokens differ; then the published code repeats tokens it has already taken.
        assert [i % 36 for i in order[:36]] == [i % 36 for i in expected[:36]]


@pytest.mark.parametrize(("seed", "k"), [(1, 2), (2, 9), (3, 35)])
def test_picks_are_those_of_a_plain_loop(seed: int, k: int) -> None:
    tokens = images(seed, noise=1.0)
    expected = [published(image, k) for image in tokens.features]
    assert divprune(PER_TILE, tokens, k).tolist() == expected


def test_the_first_pick_is_farthest_from_its_nearest_neighbour() -> None:
    directions = torch.tensor([[1.0, 0.0], [1.0, 0.1], [-1.0, 0.5], [1.0, -0.1]])
    assert divprune(PER_TILE, plain(directions), 1).tolist() == [[2]]


def test_distance_ignores_vector_length() -> None:
    tokens = images(4, noise=1.0)
    scaled = plain(tokens.features * torch.tensor([1.0, 2.0, 4.0, 0.5]).repeat(9)[:, None])
    assert torch.equal(divprune(PER_TILE, scaled, 12), divprune(PER_TILE, tokens, 12))


@pytest.mark.parametrize("k", [3, 8, 10])
def test_tiles_are_selected_each_on_its_own(k: int) -> None:
    tokens = images(5, batch=1, grid=Grid(4, 4, tiles=3), noise=1.0)
    picks = divprune(PER_TILE, tokens, k)[0]
    for tile in range(3):
        share = k // 3 + (tile < k % 3)
        own = picks[picks // 16 == tile] % 16
        assert own.tolist() == published(tokens.features[0, 16 * tile : 16 * tile + 16], share)


def test_global_scope_sees_one_set_of_tokens() -> None:
    tokens = images(6, batch=1, grid=Grid(4, 4, tiles=3), noise=1.0)
    assert divprune(GLOBAL, tokens, 11)[0].tolist() == published(tokens.features[0], 11)


@pytest.mark.parametrize("params", [PER_TILE, GLOBAL])
@pytest.mark.parametrize("value", [1.0, 0.0, torch.nan, torch.inf])
def test_identical_tokens_repeat_no_index(params: DivPruneParams, value: float) -> None:
    picks = divprune(params, plain(torch.full((2, 24, 4), value), Grid(2, 4, tiles=3)), 20)
    assert all(row.unique().numel() == 20 for row in picks)
    assert picks.min() >= 0 and picks.max() < 24


def test_a_single_token_is_its_own_selection() -> None:
    assert divprune(PER_TILE, plain(torch.ones(1, 4)), 1).tolist() == [[0]]


def test_the_instruction_changes_nothing() -> None:
    tokens = images(7)
    assert torch.equal(divprune(PER_TILE, tokens, 9), divprune(PER_TILE, plain(tokens.features), 9))


def test_images_of_a_batch_are_independent() -> None:
    tokens = images(8, batch=3, grid=Grid(4, 4, 2), dtype=torch.float16)
    together = divprune(PER_TILE, tokens, 9)
    alone = torch.cat([divprune(PER_TILE, take(tokens, [i]), 9) for i in range(3)])
    assert torch.equal(together, alone)
