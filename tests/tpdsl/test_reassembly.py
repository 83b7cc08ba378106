"""The 81 reassembly atoms: rows of each composition, which scalar loops gave, and their orders."""

from __future__ import annotations

import pytest
import torch

from tests.tpdsl.samples import call, plain, with_relevance
from vllm_autoprune import Grid
from vllm_autoprune.tpdsl.atoms.reassembly import PRINTED, RECIPES
from vllm_autoprune.tpdsl.base_policy import ReferenceSelection, TokenSelection
from vllm_autoprune.tpdsl.registry import ATOMS

FEATURES = [[4.0, -3], [3, 3], [-2, 3], [1, 4], [-3, -1], [5, -1], [3, 1], [0, 2]]
RELEVANCE = torch.tensor([[0.4, 0.2, 0.6, 0.9, 0.5, 0.8, 0.1, 1.0]])
TOKENS = with_relevance(plain(torch.tensor(FEATURES), Grid(2, 2, tiles=2)), RELEVANCE)
KEPT = torch.tensor([[0, 2, 7]])
PARAMETERS = {"strength": 0.5, "margin": 0.02, "tau": 0.5, "radius": 1, "gate_quantile": 0.3}

# To 0: token 5; to 2: token 4; to 7: tokens 1, 3 and 6. Nearby, to 2: tokens 1 and 3; to 7: 5, 6.
ROWS = {
    "nearest.mean.residual": [4.0, -1.5, -2.5, 1.0, 1.0, 2.75],
    "nearest.mean.average": [4.0, -2.0, -2.25, 2.0, 0.667, 2.5],
    "nearest.mean.exchange": [5.0, -1.0, -2.0, 3.0, 1.0, 4.0],
    "nearest.similarity_weighted.residual": [4.113, -1.613, -2.5, 1.0, 0.922, 2.789],
    "nearest.similarity_weighted.average": [4.067, -2.174, -2.104, 2.583, 0.577, 2.494],
    "nearest.similarity_weighted.exchange": [5.0, -1.0, -2.0, 3.0, 1.0, 4.0],
    "nearest.semantic_gated.residual": [4.5, -2.0, -2.5, 1.0, 0.5, 3.0],
    "nearest.semantic_gated.average": [4.35, -2.3, -2.222, 2.111, 0.235, 2.471],
    "nearest.semantic_gated.exchange": [5.0, -1.0, -2.0, 3.0, 0.0, 2.0],
    "soft.mean.residual": [3.752, -1.415, -1.192, 2.019, 0.881, 2.156],
    "soft.mean.average": [3.841, -1.984, -1.534, 2.434, 0.572, 2.101],
    "soft.mean.exchange": [5.0, -1.0, -2.0, 3.0, 1.0, 4.0],
    "soft.similarity_weighted.residual": [4.194, -1.67, -1.19, 2.473, 0.968, 2.672],
    "soft.similarity_weighted.average": [4.103, -2.295, -1.75, 2.837, 0.513, 2.356],
    "soft.similarity_weighted.exchange": [5.0, -1.0, -2.0, 3.0, 1.0, 4.0],
    "soft.semantic_gated.residual": [4.114, -1.882, -1.359, 2.211, 0.451, 2.415],
    "soft.semantic_gated.average": [4.079, -2.22, -1.66, 2.582, 0.188, 2.173],
    "soft.semantic_gated.exchange": [5.0, -1.0, -2.0, 3.0, 0.0, 2.0],
    "local.mean.residual": [4.0, -3.0, 0.0, 3.25, 0.833, 0.833],
    "local.mean.average": [4.0, -3.0, -0.667, 3.167, 0.625, 1.125],
    "local.mean.exchange": [4.0, -3.0, 1.0, 4.0, 3.0, 1.0],
    "local.similarity_weighted.residual": [4.0, -3.0, -0.274, 3.387, 1.5, 1.5],
    "local.similarity_weighted.average": [4.0, -3.0, -1.198, 3.18, 0.36, 1.88],
    "local.similarity_weighted.exchange": [4.0, -3.0, -2.0, 3.0, 0.0, 2.0],
    "local.semantic_gated.residual": [4.0, -3.0, -0.5, 3.5, 1.045, 0.5],
    "local.semantic_gated.average": [4.0, -3.0, -1.077, 3.308, 0.575, 1.175],
    "local.semantic_gated.exchange": [4.0, -3.0, 1.0, 4.0, 0.0, 2.0],
}
"""Assignment, aggregation and output; the two channels of each kept row in raster order."""

ORDERS = {"raster": [0, 2, 7], "score": [2, 0, 7], "pick": [7, 0, 2]}
"""Ties of quality in raster order; after the picks what was exchanged in."""


@pytest.mark.parametrize("name", RECIPES)
def test_rows_of_every_composition_in_their_order(name: str) -> None:
    levels, _, order = RECIPES[name].cell.rpartition(".")
    assert name == PRINTED.get(f"{levels}.{order}", f"reassemble/{levels}.{order}")
    quality = torch.tensor([[0.3, 0, 0.5, 0, 0, 0, 0, 0.3]])
    picks, sound = torch.tensor([[7, 5, 0]]), torch.zeros(1, dtype=torch.uint8)
    chosen = TokenSelection(KEPT, ReferenceSelection(picks), sound, quality)
    taken = {key: PARAMETERS[key] for key in ATOMS[name].call.parameters() if key in PARAMETERS}
    rows, placed = RECIPES[name](call(name, **taken), TOKENS, chosen)
    assert placed[0].tolist() == ORDERS[order]
    expected = dict(zip([0, 2, 7], torch.tensor(ROWS[levels]).view(3, 2), strict=True))
    wanted = torch.stack([expected[token] for token in ORDERS[order]])
    torch.testing.assert_close(rows[0], wanted, atol=1e-3, rtol=0)


def test_eight_names_are_the_papers_and_rows_merged_by_the_base_policy_are_the_anchors() -> None:
    cells = [recipe.cell for recipe in RECIPES.values()]
    assert len(PRINTED) == 8 and set(PRINTED) <= set(cells) and len(set(cells)) == 81
    # Token 2 is like 0, token 3 is between, token 4 is like 1; 0 and 1 are kept.
    tokens = plain(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [1.0, 1.0], [1.0, 3.0]]))
    kept, merged = torch.tensor([[0, 1]]), torch.tensor([[[9.0, 0.0], [0.0, 9.0]]])
    chosen = TokenSelection(kept, ReferenceSelection(kept, merged), torch.zeros(1).byte())
    rows, _ = RECIPES["mean_residual"](call("mean_residual", strength=0.5), tokens, chosen)
    assert rows[0].tolist() == [[(9 + 1.5) / 2, 0.5], [0.5, 6.0]]
