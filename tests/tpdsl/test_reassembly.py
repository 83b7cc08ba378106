"""The 81 reassembly atoms against a scalar reference, and their levels by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from torch import Tensor

from tests.tpdsl.samples import (
    active,
    call,
    edited,
    images,
    means,
    plain,
    shipped,
    take,
    token_selection,
    with_relevance,
)
from vllm_autoprune import Grid, VisualTokens, load_state, materialize, refine
from vllm_autoprune.ops.similarity import distance_to_neighbours, plain_cosines
from vllm_autoprune.tpdsl.atoms.reassembly import (
    ASSIGNMENTS,
    PRINTED,
    RECIPES,
    run_reassembly,
)
from vllm_autoprune.tpdsl.base_policy import ReferenceSelection, TokenSelection
from vllm_autoprune.tpdsl.registry import AtomCall


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


# Token 2 is like 0, token 3 is between, token 4 is like 1; 0 and 1 are kept.
ROWS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [1.0, 1.0], [1.0, 3.0]])
KEPT = torch.tensor([[0, 1]])
COSINES = [[1.0, 0.0], [0.0, 1.0], [0.8944, 0.4472], [0.7071, 0.7071], [0.3162, 0.9487]]


def near(values: Tensor, expected: list[list[float]]) -> bool:
    return torch.allclose(values.float(), torch.tensor(expected), atol=1e-3)


class TestAssignment:
    @staticmethod
    def share(level: int, call: AtomCall) -> Tensor:
        share = ASSIGNMENTS[level].function(call, torch.tensor([COSINES]), KEPT, Grid(1, 5))
        assert isinstance(share, Tensor)
        return share

    def test_soft_shares_by_a_softmax(self) -> None:
        share = self.share(1, call("anchor_weighted_residual", tau=0.5))
        odds = math.exp((0.8944 - 0.4472) / 0.5)
        assert share[0, 2].tolist() == pytest.approx([odds / (1 + odds), 1 / (1 + odds)], abs=1e-4)
        assert share[0, 3].tolist() == pytest.approx([0.5, 0.5])

    def test_local_gives_to_no_anchor_out_of_reach(self) -> None:
        # In one row, token 3 reaches only anchor 1, and token 4 none, with a radius of 2.
        share = self.share(2, call("spatial_local_residual_merge", radius=2))
        assert share[0, 2:].tolist() == [[1, 0], [0, 1], [0, 0]]


class TestAggregationAndOutput:
    """Strength 0.5 on the five tokens above: 2 and 3 belong to anchor 0, and 4 to anchor 1."""

    def rows(self, name: str, tokens: VisualTokens | None = None, **parameters: float) -> Tensor:
        parameters = parameters or {"strength": 0.5}
        actual, order = run_reassembly(
            call(name, **parameters), tokens or plain(ROWS), token_selection(KEPT)
        )
        assert torch.equal(order, KEPT)
        return actual[0]

    def test_the_gate_opens_wider_with_a_lower_quantile(self) -> None:
        tokens = with_relevance(plain(ROWS), torch.tensor([[0.0, 0.8, 0.4, 0.6, 0.2]]))
        actual = self.rows(
            "semantic_gated_residual_merge", tokens, strength=0.5, gate_quantile=0.25
        )
        assert near(actual[1:], [[0.5, 2.0]])

    def test_margin_of_two_prevents_every_exchange(self) -> None:
        assert near(self.rows("anchor_exchange", margin=2.0), [[1.0, 0.0], [0.0, 1.0]])
        assert near(self.rows("anchor_exchange", margin=0.5), [[1.0, 0.0], [0.0, 1.0]])


class TestOrdering:
    G = torch.tensor([[0.1, 0.9, 0.5, 0.9, 0.3]])
    INDICES = torch.tensor([[0, 1, 3, 4]])
    PICKS = torch.tensor([[4, 2, 0, 1]])

    def order(self, name: str) -> list[int]:
        rows, order = run_reassembly(
            call(name), plain(ROWS), token_selection(self.INDICES, self.PICKS, self.G)
        )
        assert torch.equal(rows[0], ROWS[order[0]])
        actual: list[int] = order[0].tolist()
        return actual

    def test_score_descends_and_ties_go_by_place(self) -> None:
        assert self.order("reassemble/nearest.mean.residual.score") == [1, 3, 4, 0]

    def test_pick_follows_the_base_policy_and_exchanged_tokens_come_last(self) -> None:
        assert self.order("reassemble/nearest.mean.residual.pick") == [4, 0, 1, 3]


def test_rows_merged_by_the_base_policy_are_the_anchors() -> None:
    merged = torch.tensor([[[9.0, 0.0], [0.0, 9.0]]])
    whole = torch.zeros(1, dtype=torch.uint8)
    selection = TokenSelection(KEPT, ReferenceSelection(KEPT, merged=merged), whole)
    rows, _ = run_reassembly(call("mean_residual", strength=0.5), plain(ROWS), selection)
    assert near(rows[0], [[(9 + 1.5) / 2, 0.5], [0.5, 6.0]])


GRIDS = [Grid(6, 6), Grid(4, 9), Grid(4, 4, tiles=3), Grid(1, 30)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("core", [0.0, 0.5])
def test_without_the_question_in_its_base_it_reads_none(grid: Grid, core: float) -> None:
    data = edited(shipped("autoprune"), {"/base_policy": {"name": "divprune", "params": {}}})
    state = load_state({**data, **({"core": {"share": core}} if core else {})})
    policy = materialize(state, 12)
    assert not policy.reads_instruction and policy.needs == frozenset()
    refined = refine(policy, images(3, grid=grid))
    assert refined.exchanged.tolist() == [2, 2] and not refined.fallback.any()
    assert all(len(set(kept.tolist())) == 12 for kept in refined.indices)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_an_image_alone_and_in_a_batch_is_the_same(grid: Grid) -> None:
    policy, tokens = materialize(load_state("autoprune"), 9), images(5, grid=grid, batch=3)
    together = refine(policy, tokens)
    for image in range(3):
        alone = refine(policy, take(tokens, [image]))
        assert torch.equal(alone.features[0], together.features[image])
        assert torch.equal(alone.indices[0], together.indices[image])


def test_contrast_is_the_distance_from_the_mean_of_the_neighbours() -> None:
    unit = torch.nn.functional.normalize(images(1, grid=Grid(5, 5)).features, dim=-1)
    square = unit.view(2, 5, 5, -1)
    mean = sum(square.roll(step, axis) for axis in (1, 2) for step in (1, -1)) / 4
    expected = (square - mean).norm(dim=-1).flatten(1)
    assert torch.allclose(distance_to_neighbours(plain_cosines(unit), 5, 5), expected, atol=1e-5)
    nearest = plain_cosines(unit).topk(8, dim=-1).indices
    mean = torch.stack([rows[at].mean(dim=1) for rows, at in zip(unit, nearest, strict=True)])
    expected = (unit - mean).norm(dim=-1)
    assert torch.allclose(distance_to_neighbours(plain_cosines(unit), 1, 25), expected, atol=1e-5)


def test_equal_tokens_have_no_contrast() -> None:
    cosines = plain_cosines(torch.randn(1, 1, 64).expand(1, 16, 64))
    assert distance_to_neighbours(cosines, 4, 4).tolist() == [[0.0] * 16]


def test_an_exhausted_pool_leaves_the_best_reference_tokens() -> None:
    changes = {"/constraints/pool": [{"atom": "quality_pool_builder", "pool_ratio": 0.25}]}
    data = edited(shipped("autoprune"), {**changes, "/constraints/selector/q_e": 8})
    refined = refine(materialize(load_state(data), 8), images(2))
    assert refined.exchanged.tolist() == [2, 2]
    assert refined.quality is not None
    for quality, picks, kept in zip(
        refined.quality, refined.reference, refined.indices, strict=True
    ):
        stay = picks[torch.isin(picks, kept)]
        leave = picks[~torch.isin(picks, kept)]
        assert quality[stay].min() >= quality[leave].max()
