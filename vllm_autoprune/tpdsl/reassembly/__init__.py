"""Reassembly atoms (R): the kept tokens become the rows that the language model sees.

Knows nothing about why these tokens were kept. Only features and their order change: never K,
never which tokens are kept.

81 atoms are 3 assignments x 3 aggregations x 3 outputs x 3 orderings, composed here from one
function a level. The eight that the paper prints have their names there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Annotated

import torch
from torch import Tensor

from vllm_autoprune.ops.rows import rows_at
from vllm_autoprune.tpdsl.atom import ATOMS, AtomCall, OneOf, declare
from vllm_autoprune.tpdsl.numerics import mask_of
from vllm_autoprune.tpdsl.outcome import Chosen
from vllm_autoprune.tpdsl.reassembly import aggregation, assignment, ordering, output
from vllm_autoprune.tpdsl.reassembly.aggregation import GatedCall
from vllm_autoprune.tpdsl.reassembly.assignment import LocalCall, SoftCall
from vllm_autoprune.tpdsl.reassembly.output import BlendCall, ExchangeCall, Groups
from vllm_autoprune.tpdsl.tokens import Need, VisualTokens


@dataclass(frozen=True, slots=True)
class Level:
    """One choice on one of the four axes."""

    name: str
    function: Callable[..., object]
    says: str
    call: type[AtomCall] | None = None


ASSIGNMENTS = (
    Level("nearest", assignment.nearest, "Give each discarded token to its most similar kept one"),
    Level("soft", assignment.soft, "Share each discarded token over the kept ones", SoftCall),
    Level("local", assignment.local, "Give each discarded token to a kept one nearby", LocalCall),
)
AGGREGATIONS = (
    Level("mean", aggregation.mean, "all alike"),
    Level("similarity_weighted", aggregation.similarity_weighted, "by likeness"),
    Level("semantic_gated", aggregation.semantic_gated, "by relevance above a gate", GatedCall),
)
OUTPUTS = (
    Level("residual", output.residual, "add their mean residual", BlendCall),
    Level("average", output.average, "blend with the mean of the group", BlendCall),
    Level("exchange", output.exchange, "show the most central of the group", ExchangeCall),
)
ORDERINGS = (
    Level("raster", ordering.raster, "in raster order"),
    Level("score", ordering.score, "best quality first"),
    Level("pick", ordering.pick, "in the base policy's order"),
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
"""Cell of the 3 x 3 x 3 x 3 -> name that the paper prints for it."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One of the 81: its four levels, in the order of the axes."""

    assign: Level
    aggregate: Level
    form: Level
    order: Level

    @property
    def levels(self) -> tuple[Level, Level, Level, Level]:
        """All four."""
        return self.assign, self.aggregate, self.form, self.order

    @property
    def cell(self) -> str:
        """Their names, such as ``nearest.mean.residual.raster``."""
        return ".".join(level.name for level in self.levels)

    @property
    def calls(self) -> tuple[type[AtomCall], ...]:
        """What the levels take as parameters."""
        return tuple(level.call for level in self.levels if level.call) or (AtomCall,)

    def reads(self, call: AtomCall) -> frozenset[Need]:
        """The instruction, where rows change by relevance to it."""
        gated = isinstance(call, GatedCall) and not _idle(call)
        return frozenset({"instruction"}) if gated else frozenset()

    def __call__(self, call: AtomCall, tokens: VisualTokens, chosen: Chosen) -> Rows:
        """Rows of the kept tokens and the order they stand in."""
        rows = _rows(self, call, tokens, chosen)
        turn = self.order.function(chosen, tokens.count)
        if not isinstance(turn, Tensor):
            return rows, chosen.indices
        return gather_rows(rows, turn), chosen.indices.gather(1, turn)


Rows = tuple[Tensor, Tensor]
"""Rows ``(B, P, D)``, and the index ``(B, P)`` of the token that each stands for."""


def gather_rows(features: Tensor, indices: Tensor) -> Tensor:
    """Rows ``(B, K, D)`` of features ``(B, N, D)`` at indices ``(B, K)``."""
    return rows_at(features, indices)


def _idle(call: AtomCall) -> bool:
    return isinstance(call, BlendCall | ExchangeCall) and call.idle


def _rows(recipe: Recipe, call: AtomCall, tokens: VisualTokens, chosen: Chosen) -> Tensor:
    """Rows ``(B, P, D)`` in the order of ``chosen.indices``."""
    indices = chosen.indices
    anchors = gather_rows(chosen.reference.rows(tokens), indices)
    if _idle(call):
        return anchors
    kept = mask_of(indices, tokens.count)[:, :, None]
    similarity = tokens.cosine.gather(2, indices[:, None, :].expand(-1, tokens.count, -1))
    share = recipe.assign.function(call, similarity, indices, tokens.grid)
    assert isinstance(share, Tensor)
    weight, own = _pair(recipe.aggregate.function(call, tokens, similarity, indices))
    weights = (share * weight).masked_fill(kept, 0.0)
    most = (
        torch.zeros_like(kept).expand_as(share).scatter(2, share.argmax(dim=2, keepdim=True), True)
    )
    groups = Groups(tokens, indices, anchors, weights, own, most & (weights > 0))
    rows = recipe.form.function(call, groups)
    assert isinstance(rows, Tensor)
    return rows


def _pair(weights: object) -> tuple[Tensor, Tensor]:
    assert isinstance(weights, tuple)
    of_members, of_anchors = weights
    assert isinstance(of_members, Tensor) and isinstance(of_anchors, Tensor)
    return of_members, of_anchors


def _enter(recipe: Recipe) -> str:
    name = PRINTED.get(recipe.cell, f"reassemble/{recipe.cell}")
    assign, aggregate, form, order = (level.says for level in recipe.levels)
    declare(
        name,
        "reassembly",
        recipe.calls,
        recipe,
        needs=frozenset({"instruction"} if GatedCall in recipe.calls else ()),
        origin="printed" if recipe.cell in PRINTED else "listed",
        doc=f"{assign}, weigh them {aggregate} and {form}; rows {order}.",
        reads=recipe.reads,
    )
    return name


RECIPES = {
    _enter(recipe): recipe
    for recipe in (
        Recipe(*levels) for levels in product(ASSIGNMENTS, AGGREGATIONS, OUTPUTS, ORDERINGS)
    )
}
"""Atom name -> what it is composed of."""

Reassembly = Annotated[AtomCall, OneOf("reassembly")]


def orders_by_quality(call: AtomCall) -> bool:
    """True where the order of rows follows token quality g, which then has to be scored."""
    return RECIPES[call.atom].order.name == "score"


def run_reassembly(call: AtomCall, tokens: VisualTokens, chosen: Chosen) -> Rows:
    """Rows of the kept tokens, and the token of each row, in the order of the atom."""
    found = ATOMS.of(call).function(call, tokens, chosen)
    assert isinstance(found, tuple)
    rows, order = found
    assert isinstance(rows, Tensor) and isinstance(order, Tensor)
    return rows, order
