"""The 81 reassembly atoms, compared with a scalar reference implementation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch

from tests.tpdsl.atom_policies import active, means
from tests.tpdsl.samples import call, images, token_selection, with_relevance
from vllm_autoprune import Grid
from vllm_autoprune.tpdsl.atoms.reassembly import PRINTED, RECIPES, run_reassembly


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
    """Reference implementation of one image in scalar loops; parameters as in :func:`active`."""

    cell: str
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
        return s == t and max(abs(y - v), abs(x - u)) <= 3

    def weight(self, token: int, anchor: int) -> float:
        if self.levels[1] == "mean":
            return 1.0
        if self.levels[1] == "similarity_weighted":
            return 1.0 if token == anchor else max(0.0, self.cosine(token, anchor))
        gate = sorted(self.r)[int(0.5 * (len(self.r) - 1))]
        return self.r[token] if self.r[token] >= gate else 0.0

    def shares(self, token: int) -> dict[int, float]:
        """Anchor -> share of a discarded token."""
        cosines = {anchor: self.cosine(token, anchor) for anchor in self.kept}
        if self.levels[0] == "local":
            cosines = {anchor: c for anchor, c in cosines.items() if self.near(token, anchor)}
        if self.levels[0] == "soft":
            total = sum(math.exp(c / 0.1) for c in cosines.values())
            return {anchor: math.exp(c / 0.1) / total for anchor, c in cosines.items()}
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
        row, own = self.rows[anchor], self.weight(anchor, anchor)
        parts = [(weight, self.rows[token]) for token, weight in self.members(anchor)]
        if self.levels[2] == "exchange":
            return self.most_central(anchor, own)
        if self.levels[2] == "average":
            parts.append((own, row))
        if sum(weight for weight, _ in parts) <= 0:
            return row
        return [(x + m) / 2 for x, m in zip(row, combined(parts), strict=True)]

    def most_central(self, anchor: int, own: float) -> list[float]:
        members = self.members(anchor)
        owned = [
            t
            for t, _ in members
            if max(self.all_shares[t], key=self.all_shares[t].__getitem__) == anchor
        ]
        if not owned:
            return self.rows[anchor]
        middle = unit(combined([(w, self.directions[t]) for t, w in [*members, (anchor, own)]]))
        best = max(owned, key=lambda t: dot(self.directions[t], middle))
        gain = dot(self.directions[best], middle) - dot(self.directions[anchor], middle)
        return self.rows[best if gain > 1e-5 else anchor]


def sort_key(order: str, picks: list[int], g: list[float]) -> Callable[[int], float]:
    """Key by which an ordering sorts tokens."""
    if order == "raster":
        return float
    if order == "score":
        return lambda token: -g[token]
    return lambda token: picks.index(token) if token in picks else 99 + token


GRID = Grid(3, 4, tiles=2)


@means(*RECIPES)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_composition_equals_the_scalar_reference(name: str, seed: int) -> None:
    cell = RECIPES[name].cell
    source = torch.Generator().manual_seed(seed)
    relevance = torch.rand(2, 24, generator=source)
    tokens = with_relevance(images(seed, grid=GRID, width=5), relevance)
    order = torch.rand(2, 24, generator=source).argsort(dim=1)
    kept = order[:, :7].sort(dim=1).values
    picks, g = order[:, 3:10], torch.rand(2, 24, generator=source)
    rows, placed = run_reassembly(active(name), tokens, token_selection(kept, picks, g))
    low, high = relevance.amin(dim=1, keepdim=True), relevance.amax(dim=1, keepdim=True)
    r = (relevance - low) / (high - low)
    for image in range(2):
        here = kept[image].tolist()
        scalar = ScalarReassembly(
            cell, tokens.features[image].tolist(), GRID, here, r[image].tolist()
        )
        expected = [scalar.row(anchor) for anchor in here]
        turn = sort_key(cell.rpartition(".")[2], picks[image].tolist(), g[image].tolist())
        expected_order = sorted(here, key=turn)
        assert placed[image].tolist() == expected_order
        by_token = dict(zip(here, expected, strict=True))
        torch.testing.assert_close(
            rows[image], torch.tensor([by_token[i] for i in expected_order]), atol=1e-3, rtol=1e-5
        )


def test_the_81_compositions_are_distinct() -> None:
    source = torch.Generator().manual_seed(3)
    tokens = with_relevance(images(3, batch=8), torch.rand(8, 36, generator=source))
    order = torch.rand(8, 36, generator=source).argsort(dim=1)
    kept, picks = order[:, :8].sort(dim=1).values, order[:, 2:10]
    picked = token_selection(kept, picks, torch.rand(8, 36, generator=source))
    seen = set()
    for name in RECIPES:
        rows, placed = run_reassembly(active(name), tokens, picked)
        seen.add((tuple(placed.flatten().tolist()), tuple(rows.flatten().tolist())))
    assert len(RECIPES) == len(seen) == 81


@pytest.mark.parametrize("name", RECIPES)
def test_by_default_nothing_changes_but_the_order(name: str) -> None:
    tokens = images(1, dtype=torch.float16)
    kept, g = torch.tensor([[2, 3, 11], [0, 30, 35]]), torch.rand(2, 36)
    rows, placed = run_reassembly(call(name), tokens, token_selection(kept, kept.flip(1), g))
    assert torch.equal(rows, tokens.features.gather(1, placed[:, :, None].expand(-1, -1, 16)))
    assert torch.equal(placed.sort(dim=1).values, kept)


def test_names_of_the_paper_map_to_eight_compositions() -> None:
    cells = [recipe.cell for recipe in RECIPES.values()]
    assert len(PRINTED) == 8 and set(PRINTED) <= set(cells) and len(set(cells)) == 81
    assert all(RECIPES[name].cell == cell for cell, name in PRINTED.items())
    others = [name for name in RECIPES if name not in PRINTED.values()]
    assert all(name == f"reassemble/{RECIPES[name].cell}" for name in others)
