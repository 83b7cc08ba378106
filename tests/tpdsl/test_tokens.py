"""VisualTokens and their tiles; their language prefix is tested where the plugin makes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.tpdsl.samples import images, plain
from vllm_autoprune import Grid, SelectionError, VisualTokens, load_state, materialize, refine
from vllm_autoprune.tpdsl.tokens import join_tiles


@pytest.mark.parametrize("shape", [(4, 8), (1, 5, 8)])
def test_features_must_fit_the_grid(shape: tuple[int, ...]) -> None:
    with pytest.raises(SelectionError, match="N = 4 of the grid 2 x 2 x 1 tiles, got shape"):
        VisualTokens(torch.zeros(shape), Grid(2, 2))


def test_cosines_by_hand_or_as_they_are_known() -> None:
    tokens = plain(torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0], [-5.0, 0.0]]), Grid(1, 2, 2))
    half = pytest.approx(0.5**0.5)
    assert tokens.cosine[0, 0].tolist() == [1, 0, half, -1]
    assert tokens.tile_cosine[1, 0].tolist() == [pytest.approx(1), pytest.approx(-(0.5**0.5))]
    policy, three = materialize(load_state("autoprune"), 8), images(batch=3)
    known = replace(three, known_cosine=three.cosine.clone())
    assert known.cosine is known.known_cosine
    assert torch.equal(refine(policy, known).indices, refine(policy, three).indices)


def test_nested_picks_interleave_by_rank_and_the_last_tiles_drop_their_last() -> None:
    picks, image = torch.tensor([[5, 0], [4, 1], [3, 2]]), plain(torch.eye(18), Grid(2, 3, 3))
    assert join_tiles(picks, image, (2, 1, 1)).tolist() == [[5, 10, 15, 0]]
