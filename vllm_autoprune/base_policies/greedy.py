"""Greedy base policies, which pick one token after another: what all of them share.

All of them can continue from given tokens, so a core and its delta together are what one selection
would keep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

import torch
from torch import Tensor

from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.ops.greedy import Conditioned
from vllm_autoprune.ops.rowwise import gather_rows, mask_from_indices
from vllm_autoprune.tpdsl.base_policy import Given, P, ReferenceSelection, base_policy
from vllm_autoprune.tpdsl.tokens import Need, VisualTokens, split_over_tiles

SCOPE = "select within each tile or across all tiles of an image"
"""Description of the parameter ``tile_scope``."""

_Pick = Callable[[P, VisualTokens, int, Given], Tensor]


def greedy_policy(
    params: type[P],
    *,
    cost: float,
    needs: frozenset[Need] = frozenset(),
    reads: Callable[[P], frozenset[Need]] | None = None,
    core: type[P] | None = None,
) -> Callable[[_Pick[P]], _Pick[P]]:
    """Decorator: register a greedy policy by a function that returns its picks ``(B, K)``."""

    def register(function: _Pick[P]) -> _Pick[P]:
        @base_policy(
            params,
            cost=cost,
            needs=needs,
            continuation=function,
            reads=reads,
            core=core,
        )
        @wraps(function)
        def select(params: P, tokens: VisualTokens, budget: int) -> ReferenceSelection:
            return ReferenceSelection(
                function(params, tokens, budget, Given.none(tokens))
            )

        return function

    return register


@dataclass(frozen=True, slots=True)
class Sets:
    """The R sets of n tokens that a policy picks from: the tiles of each image, or whole images.

    ``across`` selects whole images; ``start`` holds the given tokens.
    """

    tokens: VisualTokens
    budget: int
    start: Given
    across: bool = False

    @property
    def per_image(self) -> int:
        """Number of sets of an image."""
        return 1 if self.across else self.tokens.grid.tiles

    @property
    def shares(self) -> tuple[int, ...]:
        """Number of tokens to pick from each set of an image, the largest number first."""
        return split_over_tiles(self.budget, self.per_image)

    def of(self, values: Tensor) -> Tensor:
        """Values ``(B, N, ...)`` regrouped by set as ``(R, n, ...)``."""
        return values if self.across else self.tokens.by_tile(values)

    @property
    def given(self) -> Tensor:
        """Mask ``(R, n)`` of the given tokens."""
        return self.of(mask_from_indices(self.start.indices, self.tokens.count))

    @property
    def closed(self) -> Tensor:
        """Mask ``(R, n)`` of the tokens that may not be picked."""
        return self.of(self.start.closed)

    def join(self, picks: Tensor) -> Tensor:
        """Picks ``(R, shares[0])`` within sets, as picks ``(B, K)`` within images."""
        if self.across:
            return picks
        return self.tokens.join_tiles(
            picks, self.shares, self.start.next_tile(self.tokens)
        )

    def given_in_sets(self) -> tuple[Tensor, Tensor | None]:
        """Given tokens ``(R, A)`` as indices within sets, and which of them are in their set.

        The mask ``(R, A)`` is None if all of them are.
        """
        fixed = self.start.indices
        if self.across or self.tokens.grid.tiles == 1:
            return fixed, None
        size = self.tokens.grid.per_tile
        tile = torch.arange(self.tokens.grid.tiles, device=fixed.device)[None, :, None]
        inside = (fixed // size)[:, None] == tile
        fixed = (fixed % size)[:, None].expand_as(inside)
        return fixed.flatten(0, 1), inside.flatten(0, 1)

    def nearest_given(self, distance: Tensor) -> Tensor:
        """Distance ``(R, n)`` of each token to the nearest given one of its set, of ``(R, n, n)``.

        Infinite in a set without given tokens.
        """
        if not self.start.indices.shape[1]:
            return distance.new_full(distance.shape[:2], torch.inf)
        fixed, inside = self.given_in_sets()
        rows = gather_rows(distance, fixed)
        if inside is not None:
            rows = rows.masked_fill_(~inside[:, :, None], torch.inf)
        return rows.amin(dim=1)

    def pick_by_map(self, similarity: Tensor, quality: Tensor) -> Tensor:
        """Picks ``(B, K)`` by greedy MAP on the similarity ``(R, n, n)``, weighted by quality.

        The similarity is conditioned on the given tokens.
        """
        eligible = conditioned = None
        if self.start.max_closed:
            eligible = ~self.closed
            conditioned = Conditioned.on(similarity, *self.given_in_sets())
        count = self.shares[0]
        picks = greedy_map(
            similarity, quality, count, eligible=eligible, conditioned=conditioned
        )
        return self.join(picks)
