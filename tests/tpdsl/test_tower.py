"""Which cells stay inside a tower, how the rule is written, and what states make of the rest."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy
import pytest
import torch

from tests.tables import parametrize_from_file
from tests.tpdsl.samples import call, images
from vllm_autoprune.errors import StateError
from vllm_autoprune.tpdsl.atoms.pools import _grid_cells, build_pool
from vllm_autoprune.tpdsl.atoms.reassembly import RECIPES
from vllm_autoprune.tpdsl.atoms.signals import run_signal
from vllm_autoprune.tpdsl.base_policy import ReferenceSelection, TokenSelection
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens
from vllm_autoprune.tpdsl.tower import Tower, keep_cells

STATES = torch.tensor([[0.0, 0], [4, 0], [0, 1], [-4, 0], [0, -1], [0, 3]])
"""Of the mean (0, 1/2), as far as 1/4, 16 1/4, 1/4, 16 1/4, 2 1/4 and 6 1/4, squared."""


@pytest.mark.parametrize(
    ("count", "kept"),
    [
        (1, [1]),
        (2, [1, 3]),
        (3, [1, 3, 5]),
        (4, [1, 3, 4, 5]),
        (5, [0, 1, 3, 4, 5]),
        (6, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_cells_that_differ_most_from_the_mean_stay_in_their_order(
    count: int, kept: list[int]
) -> None:
    """Of equal ones, the first."""
    assert keep_cells(STATES, count, "difference").tolist() == kept


def test_cells_that_stay_of_fewer_stay_of_more() -> None:
    states = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    kept = [set(keep_cells(states, n, "difference").tolist()) for n in range(1, 41)]
    assert all(few < more for few, more in pairwise(kept))
    shifted = keep_cells(states + 5, 12, "difference")
    assert shifted.tolist() == keep_cells(states, 12, "difference").tolist()


@pytest.mark.parametrize(
    ("text", "encoded", "count", "depth"),
    [
        ("2/3@1/3", 144, 96, 1 / 3),
        ("2/3:64-4096@33%", 72, 64, 0.33),
        ("2/3:64-4096@33%", 48, 48, 0.33),
        ("50%:1-1000@12.5%", 4096, 1000, 0.125),
        ("100@9/10", 144, 100, 0.9),
    ],
)
def test_a_rule_is_a_share_within_bounds_at_a_depth(
    text: str, encoded: int, count: int, depth: float
) -> None:
    rule = Tower.parse(text, "/tower")
    assert rule is not None
    assert (rule.count_cells(encoded), rule.depth) == (count, depth)
    assert Tower.parse(str(rule), "") == rule
    assert Tower.parse(rule.model_dump(mode="json"), "") == rule


def test_none_is_no_rule() -> None:
    assert Tower.parse("none", "/tower") is None


@parametrize_from_file("value")
def test_what_is_no_rule_is_refused(value: object) -> None:
    with pytest.raises(StateError, match="is no rule for cells inside the tower -> "):
        Tower.parse(value, "/tower")


# ---- tokens of cells whose places only a tensor says ----

GRID = Grid(3, 4, remaining=7)
KEPT = ([0, 2, 3, 5, 8, 9, 11], [1, 2, 4, 5, 6, 7, 10])
"""Of two images."""


def remaining(features: torch.Tensor, grid: Grid = GRID) -> VisualTokens:
    return VisualTokens(features, grid, places=torch.tensor(KEPT))


@pytest.mark.parametrize(
    "name",
    ["spatial_centrality_prior", "local_contrast_saliency", "local_detail_energy"],
)
def test_signals_that_read_a_grid_see_tokens_at_their_places(name: str) -> None:
    """A place that the tower has emptied is like the token before it, or else the first."""
    features = images(grid=Grid(1, 7)).features
    filled = [
        [max(0, sum(k <= at for k in kept) - 1) for at in range(12)] for kept in KEPT
    ]
    dense = torch.stack([rows[at] for rows, at in zip(features, filled, strict=True)])
    none = torch.zeros(2, 1, dtype=torch.int64)
    found = run_signal(call(name), remaining(features), none)
    expected = run_signal(call(name), VisualTokens(dense, Grid(3, 4)), none)
    torch.testing.assert_close(found, expected.gather(1, torch.tensor(KEPT)))


def test_parts_of_a_grid_have_the_tokens_of_their_places() -> None:
    dense, _ = _grid_cells(images(grid=Grid(3, 4)), 2)
    found, _ = _grid_cells(remaining(images(grid=Grid(1, 7)).features), 2)
    assert found.tolist() == dense[0][torch.tensor(KEPT)].tolist()


def test_places_are_those_among_cells_that_were_encoded() -> None:
    """Cells 0 and 6 of 12 are dropped before the tower; it drops three more."""
    anchors = numpy.array([1, 1, 2, 3, 4, 5, 5, 7, 8, 9, 10, 11], numpy.int32)
    grid = Grid(3, 4, anchors=anchors.tobytes(), remaining=7)
    encoded = [place for place in range(12) if anchors[place] == place]
    kept = [[0, 1, 2, 4, 6, 8, 9]] * 2
    features = images(grid=Grid(1, 7)).features
    tokens = VisualTokens(features, grid, places=torch.tensor(kept))
    places = tokens.at_tokens(torch.arange(12)[None])
    assert places.tolist() == [[encoded[cell] for cell in kept[0]]] * 2
    assert tokens.at_places(tokens.cosine).shape == (2, 12, 12)


def test_tokens_at_all_their_places_are_treated_as_a_whole_grid() -> None:
    """By every reassembly that reads places, and by the pool that covers the grid."""
    dense = images(grid=Grid(3, 4))
    every = torch.arange(12).expand(2, -1)
    same = replace(dense, grid=Grid(3, 4, remaining=12), places=every)
    torch.testing.assert_close(
        same.centre_distance, dense.centre_distance.expand(2, -1)
    )
    indices = torch.tensor([[0, 5, 10], [2, 3, 11]])
    picks = ReferenceSelection(indices)
    quality = torch.rand(2, 12, generator=torch.Generator().manual_seed(0))
    sound = torch.zeros(2, dtype=torch.uint8)
    chosen = TokenSelection(indices, picks, sound, quality)
    for name, recipe in RECIPES.items():
        made = [recipe(call(name), tokens, chosen)[0] for tokens in (dense, same)]
        torch.testing.assert_close(made[1], made[0], msg=name)
    pool = (call("spatial_coverage_pool_builder"),)
    orders = [build_pool(pool, tokens, quality, indices) for tokens in (dense, same)]
    assert torch.equal(orders[0], orders[1])
