"""Reassembly (R): compute the rows of the kept tokens that the language model reads.

Discarded tokens are merged into kept ones, and the rows may be reordered; K and the set of kept
tokens never change. The 81 atoms are 3 assignments x 3 aggregations x 3 outputs x 3 orderings;
eight of them have a name in the paper.

- Assignment: shares ``(B, N, P)`` float32 of each token for the anchors (kept tokens) at indices
  ``(B, P)``, from the cosines ``(B, N, P)`` to them. Shares of a token sum to 1, or are all 0 if it
  has no anchor; shares of kept tokens are ignored.
- Aggregation: weights >= 0 of all tokens for each anchor ``(B, N, P)``, or ``(B, N, 1)`` if they
  are the same for every anchor, and weights ``(B, P)`` of the anchors themselves.
- Output: rows ``(B, P, D)``, from the members of each group and their weights.
- Ordering: a permutation ``(B, P)`` of the ascending indices, or None for no change. Position ids
  are assigned to rows in order, so any order but raster changes the position at which the model
  sees a token; whether that helps is left to the search.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.rowwise import (
    gather_rows,
    mask_from_indices,
    min_max_normalise,
    positions_in_order,
    rank_descending,
)
from vllm_autoprune.ops.similarity import SETTLED, matmul_each, strip_size
from vllm_autoprune.tpdsl.base_policy import TokenSelection
from vllm_autoprune.tpdsl.registry import AtomCall, OneOf, added, atom
from vllm_autoprune.tpdsl.tokens import VisualTokens


class _SoftCall(AtomCall):
    tau: float = Field(
        0.1,
        ge=0.01,
        le=1.0,
        description="softmax of cosine / tau; small values approach nearest",
    )


class _LocalCall(AtomCall):
    radius: int = Field(
        3,
        ge=1,
        le=12,
        description="largest distance of that one in rows, and in columns, of its tile; a token "
        "that has none within it moves no row",
    )


class _GatedCall(AtomCall):
    gate_quantile: float = Field(
        0.5,
        ge=0.0,
        le=0.95,
        description="quantile of the relevance of all tokens, below which the weight is 0",
    )


_ROUNDING = 1e-5
"""Gain in cosine below which two members count as equally central. In a group of two they always
do."""


class _RowsCall(AtomCall):
    """Parameters of an output."""

    def describe(self, doc: str) -> str:
        """What changes: rows and their order, or their order alone."""
        return f"Rows do not change;{doc.partition(';')[2]}" if self.idle else doc


class _BlendCall(_RowsCall):
    """Parameters of residual and average; with strength 0 no row changes."""

    strength: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="how far rows move: share of the mean in the row; 0: rows do not change",
    )

    @property
    def idle(self) -> bool:
        """Whether no row changes."""
        return self.strength == 0.0


class _NearestCall(_BlendCall):
    """Parameters of anchor_weighted_residual."""

    nearest: bool = added(
        False,
        description="true: in place of soft, the group of a kept token is itself and the tokens of "
        "its tile that are most similar to it; their weights in the mean fall by 5 % from the "
        "centre to the farthest token and by 3 % with likeness to another, and tau does nothing",
    )

    def describe(self, doc: str) -> str:
        """Whether tokens are shared by all kept ones."""
        order = doc.partition(";")[2]
        if self.nearest:
            doc = (
                "Assign each discarded token to the most similar kept one of its tile, weight them "
                "by place and likeness, move the kept row towards the mean of them and itself;"
                f"{order}"
            )
        return super().describe(doc)


class _ExchangeCall(_RowsCall):
    """Parameters of exchange; cosines differ by at most 2, so with a margin of 2 no row changes."""

    margin: float = Field(
        10.0,
        ge=0.0,
        le=10.0,
        description="smallest gain in cosine to the group's mean; no gain exceeds 2, so from 2 on "
        "rows do not change",
    )

    @property
    def idle(self) -> bool:
        """Whether no row changes."""
        return self.margin >= 2.0


@dataclass(frozen=True, slots=True)
class _Level:
    """A level of one of the four axes (assignment, aggregation, output, ordering)."""

    name: str
    description: str
    call: type[AtomCall] | None = None


ASSIGNMENTS = (
    _Level("nearest", "Assign each discarded token to its most similar kept one"),
    _Level(
        "soft", "Assign each discarded token to all kept ones by softmax", _SoftCall
    ),
    _Level(
        "local",
        "Assign each discarded token to the most similar kept one nearby",
        _LocalCall,
    ),
)
AGGREGATIONS = (
    _Level("mean", "equally"),
    _Level("similarity_weighted", "by max(cosine, 0)"),
    _Level(
        "semantic_gated", "by normalised relevance or, below a quantile, 0", _GatedCall
    ),
)
OUTPUTS = (
    _Level("residual", "move the kept row towards their mean", _BlendCall),
    _Level(
        "average",
        "move the kept row towards the mean of them and itself, which is less far",
        _BlendCall,
    ),
    _Level(
        "exchange",
        "replace the kept row by the most central one of its group",
        _ExchangeCall,
    ),
)
ORDERINGS = (
    _Level("raster", "rows in raster order"),
    _Level("score", "rows by descending quality"),
    _Level(
        "pick",
        "rows in the base policy's pick order, exchanged tokens behind in raster order",
    ),
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
"""The four levels of an atom -> the atom's name in the paper."""


Rows = tuple[Tensor, Tensor]
"""Rows ``(B, P, D)``, and the index ``(B, P)`` of the token of each row."""


@dataclass(frozen=True, slots=True)
class _Recipe:
    """One of the 81 atoms: one level of each axis."""

    assign: _Level
    aggregate: _Level
    output: _Level
    order: _Level

    @property
    def level_names(self) -> str:
        """Names of the levels, such as ``nearest.mean.residual.raster``."""
        levels = (self.assign, self.aggregate, self.output, self.order)
        return ".".join(level.name for level in levels)

    def declare(self) -> str:
        """Register the atom with the parameters of its levels, and return its name."""
        name = PRINTED.get(self.level_names, f"reassemble/{self.level_names}")
        levels = (self.assign, self.aggregate, self.output, self.order)
        calls = tuple(level.call for level in levels if level.call)
        if name == "anchor_weighted_residual":
            calls = tuple(
                _NearestCall if call is _BlendCall else call for call in calls
            )
        assign, aggregate, output, order = (level.description for level in levels)
        atom(
            "reassembly",
            calls,
            name=name,
            needs=frozenset({"instruction"} if _GatedCall in calls else ()),
            origin="printed" if self.level_names in PRINTED else "listed",
            doc=f"{assign}, weight them {aggregate}, {output}; {order}.",
        )(self)
        return name

    def __call__(self, call: Any, tokens: VisualTokens, chosen: TokenSelection) -> Rows:
        """Rows of the kept tokens, and the index of each row's token."""
        indices = chosen.indices
        rows = gather_rows(chosen.reference.rows(tokens), indices)
        if isinstance(call, _NearestCall) and call.nearest and not call.idle:
            rows = _nearest_residual(
                call.strength, tokens, indices, rows, chosen.mergeable
            )
        elif not call.idle:
            rows = self._merge(call, tokens, chosen, rows)
        if self.order.name == "raster":
            return rows, indices
        if self.order.name == "score":  # descending quality; ties in raster order
            assert chosen.quality is not None, (
                "a policy that orders by quality computes it"
            )
            permutation = rank_descending(chosen.quality.gather(1, indices))
        else:  # pick order of the base policy, then exchanged tokens in raster order
            picks = chosen.reference.picks
            every = torch.ones(
                len(picks), tokens.count, dtype=torch.bool, device=picks.device
            )
            turn = positions_in_order(picks, every).gather(1, indices)
            permutation = turn.argsort(dim=1, stable=True)
        return gather_rows(rows, permutation), indices.gather(1, permutation)

    def weigh(
        self, call: Any, tokens: VisualTokens, indices: Tensor, mergeable: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of tokens for each anchor ``(B, N, P)`` and of anchors ``(B, P)``, and a mask.

        The mask ``(B, N, P)`` is true for the anchor with the largest share of a token.
        """
        kept = mask_from_indices(indices, tokens.count)[:, :, None]
        similarity = tokens.cosine.gather(
            2, indices[:, None, :].expand(-1, tokens.count, -1)
        )
        if self.assign.name == "soft":  # softmax of cosine / tau over all anchors
            share = (similarity / call.tau).softmax(dim=2)
        elif (
            self.assign.name == "nearest"
        ):  # all of it to the most similar; ties go to the first
            share = _one_hot(similarity.argmax(dim=2), similarity)
        else:  # the most similar within the radius and the tile, if there is one
            grid = tokens.grid
            token = torch.arange(grid.tokens, device=similarity.device)
            tile = token // grid.per_tile
            position = torch.arange(grid.height * grid.width, device=similarity.device)
            position = tokens.at_tokens(position[None]).repeat(1, grid.tiles)
            position = position.expand(tokens.batch, -1)
            apart = torch.maximum(
                _distance_to_anchors(position // grid.width, indices),
                _distance_to_anchors(position % grid.width, indices),
            )
            near = (tile[:, None] == tile[indices][:, None]) & (apart <= call.radius)
            nearby = similarity.masked_fill(~near, -torch.inf)
            share = _one_hot(nearby.argmax(dim=2), similarity) * near
        largest = torch.zeros_like(share, dtype=torch.bool)
        largest = largest.scatter(2, share.argmax(dim=2, keepdim=True), True)

        weight = torch.ones_like(share[:, :, :1])
        anchor_weights = torch.ones_like(share[:, 0])
        if self.aggregate.name == "similarity_weighted":  # negative cosines count as 0
            weight = similarity.clamp_min(0)
        elif (
            self.aggregate.name == "semantic_gated"
        ):  # relevance; 0 below the gate quantile
            r = min_max_normalise(tokens.require_instruction().relevance())
            gate = r.sort(dim=1).values[
                :, int(call.gate_quantile * (tokens.count - 1)), None
            ]
            relevance = r.masked_fill(r < gate, 0.0)
            weight = relevance[:, :, None]
            anchor_weights = relevance.gather(1, indices)
        unmerged = kept
        if mergeable is not None:
            unmerged = kept | ~mergeable[:, :, None]
        return (share * weight).masked_fill(unmerged, 0.0), anchor_weights, largest

    def _merge(
        self, call: Any, tokens: VisualTokens, chosen: TokenSelection, anchors: Tensor
    ) -> Tensor:
        """Rows ``(B, P, D)`` of the anchors with the members of their groups merged in."""
        indices = chosen.indices
        weights, anchor_weights, largest = self.weigh(
            call, tokens, indices, chosen.mergeable
        )
        if self.output.name == "exchange":
            # The member nearest to the group's mean direction replaces the anchor if it is nearer
            # by the margin. Weights only define that direction: choosing the member of largest
            # weight would never replace an anchor, because no weight exceeds the anchor's own.
            of_anchors = indices[:, None, :]
            member = largest & (weights > 0)
            weights = weights.scatter(1, of_anchors, anchor_weights[:, None, :])
            along = matmul_each(tokens.cosine, weights)
            length = (
                (along * weights).sum(dim=1, keepdim=True).clamp_min(SETTLED).sqrt()
            )
            near = along / length
            best, central = near.masked_fill(~member, -torch.inf).max(dim=1)
            replaced = best - near.gather(1, of_anchors)[:, 0] > call.margin + _ROUNDING
            width = tokens.features.shape[2]
            entering = tokens.features.gather(
                1, central[:, :, None].expand(-1, -1, width)
            )
            return torch.where(
                replaced[:, :, None], entering.to(anchors.dtype), anchors
            )

        # One image at a time: bit-identical in any batch, and only one image is copied to float32.
        pairs = zip(weights, tokens.features, strict=True)
        sums = torch.stack([weight.T @ features.float() for weight, features in pairs])
        total = weights.sum(dim=1)[:, :, None]
        wide = anchors.float()
        if (
            self.output.name == "residual"
        ):  # x_a + strength * (mean of the members - x_a)
            mean = sums / total.clamp_min(SETTLED)
            step = torch.where(total > SETTLED, mean - wide, torch.zeros_like(mean))
            moved: Tensor = wide + call.strength * step
            return moved.to(anchors.dtype)
        # (1 - strength) * x_a + strength * mean of the members and the anchor itself
        total = total + anchor_weights[:, :, None]
        mean = (sums + anchor_weights[:, :, None] * wide) / total.clamp_min(SETTLED)
        mean = torch.where(total > SETTLED, mean, wide)
        blend: Tensor = (1 - call.strength) * wide + call.strength * mean
        return blend.to(anchors.dtype)


def _one_hot(owner: Tensor, similarity: Tensor) -> Tensor:
    return torch.zeros_like(similarity).scatter_(2, owner[:, :, None], 1.0)


def _nearest_residual(
    strength: float,
    tokens: VisualTokens,
    indices: Tensor,
    anchors: Tensor,
    mergeable: Tensor | None,
) -> Tensor:
    """x_a + strength * (weighted mean of the group - x_a), as in the released code.

    The group of an anchor is the anchor and the tokens of its tile that are most similar to it. The
    weight of a token is exp(0.05 (1 - d) - 0.03 s): d is its distance from the centre divided by
    the largest distance, and s its min-max normalised similarity to the most similar other token of
    the tile.
    """
    count = tokens.count
    kept = indices.shape[1]
    per_tile = tokens.grid.per_tile
    device = indices.device
    within = tokens.tile_cosine
    tile = torch.arange(count, device=device) // per_tile
    similarity = tokens.by_image(within).gather(
        2, (indices % per_tile)[:, None].expand(-1, count, -1)
    )
    apart = tile[:, None] != tile[indices][:, None]
    similarity = similarity.masked_fill(apart, -torch.inf)
    place = torch.arange(kept, device=device).expand_as(indices)
    nearest, owner = similarity.max(dim=2)
    owner = owner.scatter(1, indices, place)
    distance = tokens.centre_distance
    far = distance / distance.amax(dim=1, keepdim=True).clamp_min(SETTLED)
    itself = torch.eye(per_tile, dtype=torch.bool, device=device)
    likeness = tokens.by_image(within.masked_fill(itself, -torch.inf).amax(dim=2))
    weight = torch.exp(0.05 * (1 - far) - 0.03 * min_max_normalise(likeness))
    joins = nearest.isfinite()  # a tile may have no anchor
    if mergeable is not None:
        joins = joins & mergeable.scatter(1, indices, True)
    weight = weight.masked_fill(~joins, 0.0)
    means = [
        _mean_groups(owners, weights, rows, kept)
        for owners, weights, rows in zip(owner, weight, tokens.features, strict=True)
    ]
    wide = anchors.float()
    return (wide + strength * (torch.stack(means) - wide)).to(anchors.dtype)


def _distance_to_anchors(line: Tensor, indices: Tensor) -> Tensor:
    """Distance ``(B, N, P)`` between the rows, or columns, ``(B, N)`` of tokens and of anchors."""
    return (line[:, :, None] - line.gather(1, indices)[:, None]).abs()


def _mean_groups(owner: Tensor, weight: Tensor, rows: Tensor, count: int) -> Tensor:
    """Weighted means ``(P, D)`` float32 of the rows ``(N, D)`` of each group; weight ``(N,)``."""
    if rows.is_cuda:  # where index_add adds in any order
        member = (owner == torch.arange(count, device=rows.device)[:, None]).to(
            weight.dtype
        )
        return member @ (weight[:, None] * rows.float()) / (member @ weight[:, None])
    total = weight.new_zeros(count).index_add_(0, owner, weight)
    sums = weight.new_zeros(count, rows.shape[1])
    # Strips that fit in the cache are five times as fast, and have the same bits.
    step = strip_size(rows)
    for low in range(0, len(rows), step):
        strip = slice(low, low + step)
        sums.index_add_(0, owner[strip], weight[strip, None] * rows[strip].float())
    return sums / total[:, None]


RECIPES = {
    recipe.declare(): recipe
    for recipe in (
        _Recipe(*levels)
        for levels in product(ASSIGNMENTS, AGGREGATIONS, OUTPUTS, ORDERINGS)
    )
}
"""Atom name -> its recipe, with a level of each of the four axes."""

Reassembly = Annotated[AtomCall, OneOf("reassembly")]
