from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.tpdsl.atom_policies import means
from tests.tpdsl.samples import call, images, plain
from vllm_autoprune import Grid, VisualTokens
from vllm_autoprune.tpdsl.atoms.scoring import run_signal

NAME = "mean_dissimilarity_saliency"
PICKS = torch.zeros(1, 1, dtype=torch.int64)
RIGHT_ANGLE = plain(torch.tensor([[2.0, 0.0], [5.0, 0.0], [0.0, 1.0]]))
"""Two tokens of one direction and one across: mean cosines of 1/2, 1/2 and 0."""


def score(tokens: VisualTokens, **parameters: object) -> list[float]:
    values: list[float] = run_signal(call(NAME, **parameters), tokens, PICKS)[0].tolist()
    return values


@means(NAME)
def test_the_token_unlike_all_others_has_weight_one() -> None:
    assert score(RIGHT_ANGLE) == pytest.approx([0, 0, 1], abs=1e-5)


def test_the_sigmoid_is_of_deviations_from_the_mean() -> None:
    low, high = -1 / math.sqrt(2), math.sqrt(2)  # (g - mean) / deviation of (-1/2, -1/2, 0)
    expected = [1 / (1 + math.exp(-value)) for value in (low, low, high)]
    assert score(RIGHT_ANGLE, curve="sigmoid") == pytest.approx(expected, abs=1e-4)


def test_identical_tokens_weigh_one() -> None:
    assert score(plain(torch.ones(4, 3))) == [1.0] * 4


def test_scaled_variance_lets_no_channel_dominate() -> None:
    rows = torch.tensor([[1e3, 1.0], [2e3, -3.0], [1e3, -1.0]])
    scaled = rows / (rows - rows.mean(dim=0)).square().mean(dim=0).sqrt()
    unit = scaled / scaled.norm(dim=1, keepdim=True)
    g = -((unit @ unit.T).sum(dim=1) - 1) / 2
    expected = ((g - g.min()) / (g.max() - g.min())).tolist()
    assert score(plain(rows), scale_variance=True) == pytest.approx(expected, abs=1e-4)
    assert score(plain(rows)) != pytest.approx(expected, abs=0.1)


def test_tiles_are_compared_as_the_view_says() -> None:
    grid = Grid(3, 4, tiles=3)
    tokens = images(2, batch=1, grid=grid)
    alone = [score(plain(tokens.features[0, 12 * tile : 12 * tile + 12])) for tile in range(3)]
    assert score(tokens) == pytest.approx([value for tile in alone for value in tile], abs=1e-6)
    whole = dataclasses.replace(tokens, tile_scope="global")
    assert score(whole) == pytest.approx(score(plain(tokens.features[0])), abs=1e-6)
