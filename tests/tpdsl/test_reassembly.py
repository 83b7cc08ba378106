"""The 81 reassembly atoms against a scalar reference, and the shipped state that uses one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from torch import Tensor

from tests.tpdsl.samples import Json, call, edited, images, plain, shipped, with_relevance
from vllm_autoprune import Grid, load_state, materialize, refine
from vllm_autoprune.tpdsl.atoms.reassembly import PRINTED, RECIPES
from vllm_autoprune.tpdsl.base_policy import ReferenceSelection, TokenSelection
from vllm_autoprune.tpdsl.registry import ATOMS

DEFAULTS: Json = {"strength": 0.5, "margin": 0.0, "tau": 0.1, "radius": 3, "gate_quantile": 0.5}
OTHERS: Json = {"strength": 0.25, "margin": 0.1, "tau": 0.5, "radius": 1, "gate_quantile": 0.25}


def unit(row: list[float]) -> list[float]:
    length = math.sqrt(sum(v * v for v in row))
    return [v / length for v in row]


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def combined(parts: list[tuple[float, list[float]]]) -> list[float]:
    total = sum(weight for weight, _ in parts)
    return [sum(w * row[d] for w, row in parts) / total for d in range(len(parts[0][1]))]


@dataclass(frozen=True)
class ScalarReassembly:
    """Reference implementation of one image in scalar loops."""

    cell: str
    parameters: Json
    rows: list[list[float]]
    grid: Grid
    kept: list[int]
    r: list[float]

    @cached_property
    def levels(self) -> list[str]:
        return self.cell.split(".")

    @cached_property
    def directions(self) -> list[list[float]]:
        return [unit(row) for row in self.rows]

    def cosine(self, i: int, j: int) -> float:
        return dot(self.directions[i], self.directions[j])

    def near(self, i: int, j: int) -> bool:
        (s, a), (t, b) = divmod(i, self.grid.per_tile), divmod(j, self.grid.per_tile)
        (y, x), (v, u) = divmod(a, self.grid.width), divmod(b, self.grid.width)
        return s == t and max(abs(y - v), abs(x - u)) <= self.parameters["radius"]

    def weight(self, token: int, anchor: int) -> float:
        if self.levels[1] == "mean":
            return 1.0
        if self.levels[1] == "similarity_weighted":
            return 1.0 if token == anchor else max(0.0, self.cosine(token, anchor))
        gate = sorted(self.r)[int(self.parameters["gate_quantile"] * (len(self.r) - 1))]
        return self.r[token] if self.r[token] >= gate else 0.0

    def shares(self, token: int) -> dict[int, float]:
        """Anchor -> share of a discarded token."""
        cosines = {anchor: self.cosine(token, anchor) for anchor in self.kept}
        if self.levels[0] == "local":
            cosines = {anchor: c for anchor, c in cosines.items() if self.near(token, anchor)}
        if self.levels[0] == "soft":
            odds = {anchor: math.exp(c / self.parameters["tau"]) for anchor, c in cosines.items()}
            return {anchor: odd / sum(odds.values()) for anchor, odd in odds.items()}
        owner = max(cosines, key=lambda a: cosines[a], default=None)
        return {} if owner is None else {owner: 1.0}

    @cached_property
    def all_shares(self) -> dict[int, dict[int, float]]:
        discarded = [token for token in range(len(self.rows)) if token not in self.kept]
        return {token: self.shares(token) for token in discarded}

    def members(self, anchor: int) -> list[tuple[int, float]]:
        """(token, weight) of the group of an anchor."""
        weighted = [
            (token, shares[anchor] * self.weight(token, anchor))
            for token, shares in self.all_shares.items()
            if anchor in shares
        ]
        return [(token, weight) for token, weight in weighted if weight > 0]

    def row(self, anchor: int) -> list[float]:
        row, weight = self.rows[anchor], self.weight(anchor, anchor)
        parts = [(weight, self.rows[token]) for token, weight in self.members(anchor)]
        if self.levels[2] == "exchange":
            return self.most_central(anchor, weight)
        if self.levels[2] == "average":
            parts.append((weight, row))
        if sum(weight for weight, _ in parts) <= 0:
            return row
        strength = self.parameters["strength"]
        return [x + strength * (m - x) for x, m in zip(row, combined(parts), strict=True)]

    def most_central(self, anchor: int, weight: float) -> list[float]:
        members = self.members(anchor)
        owned = [
            t
            for t, _ in members
            if max(self.all_shares[t], key=self.all_shares[t].__getitem__) == anchor
        ]
        if not owned:
            return self.rows[anchor]
        middle = unit(combined([(w, self.directions[t]) for t, w in [*members, (anchor, weight)]]))
        best = max(owned, key=lambda t: dot(self.directions[t], middle))
        gain = dot(self.directions[best], middle) - dot(self.directions[anchor], middle)
        return self.rows[best if gain > self.parameters["margin"] + 1e-5 else anchor]


def sort_key(order: str, picks: list[int], g: list[float]) -> Callable[[int], float]:
    """Key by which an ordering sorts tokens."""
    if order == "raster":
        return float
    if order == "score":
        return lambda token: -g[token]
    return lambda token: picks.index(token) if token in picks else 99 + token


def chosen(indices: Tensor, picks: Tensor, g: Tensor) -> TokenSelection:
    none = torch.zeros(len(indices), dtype=torch.uint8)
    return TokenSelection(indices, ReferenceSelection(picks), none, g)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("parameters", [DEFAULTS, OTHERS], ids=["defaults", "others"])
def test_every_composition_equals_the_scalar_reference(name: str, parameters: Json) -> None:
    cell, grid = RECIPES[name].cell, Grid(3, 4, tiles=2)
    source = torch.Generator().manual_seed(0)
    relevance = torch.rand(2, 24, generator=source)
    tokens = with_relevance(images(0, grid=grid, width=5), relevance)
    order = torch.rand(2, 24, generator=source).argsort(dim=1)
    kept = order[:, :7].sort(dim=1).values
    picks, g = order[:, 3:10], torch.rand(2, 24, generator=source).mul(8).round()  # with ties
    taken = {key: parameters[key] for key in ATOMS[name].call.parameters() if key in parameters}
    rows, placed = RECIPES[call(name, **taken).atom](
        call(name, **taken), tokens, chosen(kept, picks, g)
    )
    low, high = relevance.amin(dim=1, keepdim=True), relevance.amax(dim=1, keepdim=True)
    r = (relevance - low) / (high - low)
    for image, here in enumerate(kept.tolist()):
        scalar = ScalarReassembly(
            cell, parameters, tokens.features[image].tolist(), grid, here, r[image].tolist()
        )
        turn = sort_key(cell.rpartition(".")[2], picks[image].tolist(), g[image].tolist())
        expected = sorted(here, key=turn)
        assert placed[image].tolist() == expected
        wanted = torch.tensor([scalar.row(anchor) for anchor in expected])
        torch.testing.assert_close(rows[image], wanted, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("name", RECIPES)
def test_by_default_nothing_changes_but_the_order(name: str) -> None:
    tokens = images(1, dtype=torch.float16)
    kept, g = torch.tensor([[2, 3, 11], [0, 30, 35]]), torch.rand(2, 36)
    rows, placed = RECIPES[call(name).atom](call(name), tokens, chosen(kept, kept.flip(1), g))
    assert torch.equal(rows, tokens.features.gather(1, placed[:, :, None].expand(-1, -1, 16)))
    assert torch.equal(placed.sort(dim=1).values, kept)


def test_names_of_the_paper_map_to_eight_of_the_81_compositions() -> None:
    cells = [recipe.cell for recipe in RECIPES.values()]
    assert len(PRINTED) == 8 and set(PRINTED) <= set(cells) and len(set(cells)) == 81
    for name, recipe in RECIPES.items():
        assert name == PRINTED.get(recipe.cell, f"reassemble/{recipe.cell}")


def test_rows_merged_by_the_base_policy_are_the_anchors() -> None:
    # Token 2 is like 0, token 3 is between, token 4 is like 1; 0 and 1 are kept.
    tokens = plain(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [1.0, 1.0], [1.0, 3.0]]))
    kept, merged = torch.tensor([[0, 1]]), torch.tensor([[[9.0, 0.0], [0.0, 9.0]]])
    reference, none = ReferenceSelection(kept, merged=merged), torch.zeros(1, dtype=torch.uint8)
    merging = call("mean_residual", strength=0.5)
    chosen_tokens = TokenSelection(kept, reference, none)
    rows, _ = RECIPES["mean_residual"](merging, tokens, chosen_tokens)
    assert rows[0].tolist() == [[(9 + 1.5) / 2, 0.5], [0.5, 6.0]]


def test_an_exhausted_pool_leaves_the_best_reference_tokens() -> None:
    changes = {"/constraints/pool": [{"atom": "quality_pool_builder", "pool_ratio": 0.25}]}
    data = edited(shipped("autoprune"), {**changes, "/constraints/selector/q_e": 8})
    refined = refine(materialize(load_state(data), 8), images(2))
    assert refined.exchanged.tolist() == [2, 2]
    assert refined.quality is not None
    for g, picks, kept in zip(refined.quality, refined.reference, refined.indices, strict=True):
        stays = torch.isin(picks, kept)
        assert g[picks[stays]].min() >= g[picks[~stays]].max()
