"""Reassembly atoms (R): compute the rows of the kept tokens that the language model reads.

Discarded tokens are merged into kept ones, and the rows may be reordered; K and the set of kept
tokens never change.

The 81 atoms are 3 assignments x 3 aggregations x 3 outputs x 3 orderings, composed from one
function per level. Eight of them have a name in the paper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Annotated

import torch
from torch import Tensor

from vllm_autoprune.ops.rowwise import gather_rows, mask_from_indices
from vllm_autoprune.tpdsl.atoms.reassembly import aggregation, assignment, ordering, output
from vllm_autoprune.tpdsl.atoms.reassembly.aggregation import GatedCall
from vllm_autoprune.tpdsl.atoms.reassembly.assignment import LocalCall, SoftCall
from vllm_autoprune.tpdsl.atoms.reassembly.output import (
    BlendCall,
    ExchangeCall,
    Groups,
    NearestCall,
    nearest_residual,
)
from vllm_autoprune.tpdsl.outcome import TokenSelection
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall, OneOf, declare
from vllm_autoprune.tpdsl.tokens import Need, VisualTokens


@dataclass(frozen=True, slots=True)
class Level:
    """One level of one of the four axes."""

    name: str
    function: Callable[..., object]
    description: str
    call: type[AtomCall] | None = None


ASSIGNMENTS = (
    Level(
        "nearest", assignment.nearest, "Assign each discarded token to its most similar kept one"
    ),
    Level(
        "soft", assignment.soft, "Assign each discarded token to all kept ones by softmax", SoftCall
    ),
    Level(
        "local",
        assignment.local,
        "Assign each discarded token to the most similar kept one nearby",
        LocalCall,
    ),
)
AGGREGATIONS = (
    Level("mean", aggregation.mean, "equally"),
    Level("similarity_weighted", aggregation.similarity_weighted, "by similarity"),
    Level("semantic_gated", aggregation.semantic_gated, "by relevance above a quantile", GatedCall),
)
OUTPUTS = (
    Level("residual", output.residual, "move the kept row towards their mean", BlendCall),
    Level("average", output.average, "blend the kept row with the mean of its group", BlendCall),
    Level(
        "exchange",
        output.exchange,
        "replace the kept row by the most central one of its group",
        ExchangeCall,
    ),
)
ORDERINGS = (
    Level("raster", ordering.raster, "rows in raster order"),
    Level("score", ordering.score, "rows by descending quality"),
    Level("pick", ordering.pick, "rows in the base policy's pick order"),
)

PRINTED = {
    "nearest.mean.average.raster": "nearest_anchor",
    "soft.mean.residual.raster": "anchor_weighted_residual",
    "nearest.mean.residual.raster": "mean_residual",
    "nearest.similarity_weighted.exchange.raster": "anchor_exchange",
    "soft.similarity_weighted.average.raster": "weighted_average",
    "nearest.semantic_gated.residual.raster": "semantic_gated_residual_merge",
    "nearest.similarity_weighted.residual.raster": "similarity_weighted_residual_merge",
    "local.mean.residual.raster": "spatial_local_residual_merge",
}
"""The four levels of an atom -> its name in the paper."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One of the 81 atoms: a level of each axis."""

    assign: Level
    aggregate: Level
    form: Level
    order: Level

    @property
    def levels(self) -> tuple[Level, Level, Level, Level]:
        """The four levels, in the order of the axes."""
        return self.assign, self.aggregate, self.form, self.order

    @property
    def cell(self) -> str:
        """Names of the levels, such as ``nearest.mean.residual.raster``."""
        return ".".join(level.name for level in self.levels)

    @property
    def calls(self) -> tuple[type[AtomCall], ...]:
        """Parameter models of the levels."""
        calls = tuple(level.call for level in self.levels if level.call) or (AtomCall,)
        if PRINTED.get(self.cell) == "anchor_weighted_residual":
            return tuple(NearestCall if call is BlendCall else call for call in calls)
        return calls

    def reads(self, call: AtomCall) -> frozenset[Need]:
        """The instruction, if rows are weighted by relevance to it."""
        gated = isinstance(call, GatedCall) and not _idle(call)
        return frozenset({"instruction"}) if gated else frozenset()

    def __call__(self, call: AtomCall, tokens: VisualTokens, chosen: TokenSelection) -> Rows:
        """Rows of the kept tokens, and the token of each row."""
        rows = _rows(self, call, tokens, chosen)
        permutation = self.order.function(chosen, tokens.count)
        if not isinstance(permutation, Tensor):
            return rows, chosen.indices
        return gather_rows(rows, permutation), chosen.indices.gather(1, permutation)


Rows = tuple[Tensor, Tensor]
"""Rows ``(B, P, D)``, and the index ``(B, P)`` of the token of each row."""


def _idle(call: AtomCall) -> bool:
    return isinstance(call, BlendCall | ExchangeCall) and call.idle


def _rows(recipe: Recipe, call: AtomCall, tokens: VisualTokens, chosen: TokenSelection) -> Tensor:
    """Rows ``(B, P, D)`` in the order of ``chosen.indices``."""
    indices = chosen.indices
    anchors = gather_rows(chosen.reference.rows(tokens), indices)
    if _idle(call):
        return anchors
    if isinstance(call, NearestCall) and call.nearest:
        return nearest_residual(call.strength, tokens, indices, anchors, chosen.mergeable)
    weights, own, largest = _weigh(recipe, call, tokens, indices, chosen.mergeable)
    groups = Groups(tokens, indices, anchors, weights, own, largest & (weights > 0))
    rows = recipe.form.function(call, groups)
    assert isinstance(rows, Tensor)
    return rows


def _weigh(
    recipe: Recipe,
    call: AtomCall,
    tokens: VisualTokens,
    indices: Tensor,
    mergeable: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights ``(B, N, P)`` of tokens in groups, of the kept tokens, and each largest share."""
    kept = mask_from_indices(indices, tokens.count)[:, :, None]
    similarity = tokens.cosine.gather(2, indices[:, None, :].expand(-1, tokens.count, -1))
    share = recipe.assign.function(call, similarity, indices, tokens.grid)
    assert isinstance(share, Tensor)
    largest = torch.zeros_like(share, dtype=torch.bool)
    largest = largest.scatter(2, share.argmax(dim=2, keepdim=True), True)
    weight, own = _weight_pair(recipe.aggregate.function(call, tokens, similarity, indices))
    if mergeable is not None:
        kept = kept | ~mergeable[:, :, None]
    return (share * weight).masked_fill(kept, 0.0), own, largest


def find_owners(call: AtomCall, tokens: VisualTokens, indices: Tensor) -> Tensor:
    """The kept token ``(B, N)`` that each dropped token is merged into most; -1 for none.

    ``indices`` ``(B, P)`` are the kept tokens.
    """
    if _idle(call):
        return torch.full((tokens.batch, tokens.count), -1, device=indices.device)
    weights, _, _ = _weigh(RECIPES[call.atom], call, tokens, indices, None)
    most, place = weights.max(dim=2)
    return indices.gather(1, place).masked_fill(most <= 0, -1)


def _weight_pair(weights: object) -> tuple[Tensor, Tensor]:
    assert isinstance(weights, tuple)
    of_members, of_anchors = weights
    assert isinstance(of_members, Tensor) and isinstance(of_anchors, Tensor)
    return of_members, of_anchors


def _declare(recipe: Recipe) -> str:
    name = PRINTED.get(recipe.cell, f"reassemble/{recipe.cell}")
    assign, aggregate, form, order = (level.description for level in recipe.levels)
    declare(
        name,
        "reassembly",
        recipe.calls,
        recipe,
        needs=frozenset({"instruction"} if GatedCall in recipe.calls else ()),
        origin="printed" if recipe.cell in PRINTED else "listed",
        doc=f"{assign}, weight them {aggregate}, {form}; {order}.",
        reads=recipe.reads,
    )
    return name


RECIPES = {
    _declare(recipe): recipe
    for recipe in (
        Recipe(*levels) for levels in product(ASSIGNMENTS, AGGREGATIONS, OUTPUTS, ORDERINGS)
    )
}
"""Atom name -> its four levels."""

Reassembly = Annotated[AtomCall, OneOf("reassembly")]


def orders_by_quality(call: AtomCall) -> bool:
    """Whether rows are ordered by token quality g, which then has to be computed."""
    return RECIPES[call.atom].order.name == "score"


def run_reassembly(call: AtomCall, tokens: VisualTokens, chosen: TokenSelection) -> Rows:
    """Run the reassembly of a call: rows of the kept tokens, and the token of each row."""
    reassembled = ATOMS.of(call).function(call, tokens, chosen)
    assert isinstance(reassembled, tuple)
    rows, order = reassembled
    assert isinstance(rows, Tensor) and isinstance(order, Tensor)
    return rows, order
