"""Base policies that pick one token after another: by distance, relevance, or what is not covered.

All of them can continue from given tokens, so a core and its delta together are what one selection
would keep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.ops.farthest import (
    distances,
    farthest_points,
    weighted_farthest_points,
)
from vllm_autoprune.ops.farthest_torch import Chosen
from vllm_autoprune.ops.greedy import Conditioned, greedy_coverage
from vllm_autoprune.ops.rowwise import (
    argmax_within,
    gather_rows,
    mask_from_indices,
    min_max_normalise,
    rank_descending,
    row_offsets,
)
from vllm_autoprune.ops.similarity import (
    WeightMap,
    cosines,
    cosines_between,
    half_cosines,
    map_weight,
    mean_dissimilarity,
    plain_cosines,
    scale_to_unit_variance,
    subtract_mean,
)
from vllm_autoprune.tpdsl.atoms.scoring import sharpen
from vllm_autoprune.tpdsl.base_policy import (
    Given,
    P,
    PolicyParams,
    ReferenceSelection,
    base_policy,
)
from vllm_autoprune.tpdsl.tokens import Need, TileScope, VisualTokens, split_over_tiles

_SCOPE = "select within each tile or across all tiles of an image"


_Pick = Callable[[P, VisualTokens, int, Given], Tensor]


def _greedy_policy(
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
class _Sets:
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


def _covered_by(degrees: Tensor, mask: Tensor) -> Tensor:
    """How well the candidates in a mask ``(B, N)`` cover each row: ``(B, R)``, at least 0."""
    return degrees.masked_fill(~mask[:, :, None], 0.0).amax(dim=1).clamp_min(0)


class _DivPruneParams(PolicyParams):
    """Parameters of DivPrune."""

    tile_scope: TileScope = Field("per_tile", description=_SCOPE)


@_greedy_policy(_DivPruneParams, cost=28.8)
def _divprune(
    params: _DivPruneParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """Max-min cosine distance, starting at the token farthest from its nearest neighbour.

    Source: Alvar et al., "DivPrune" (CVPR 2025), and its published code. Distances are in the dtype
    of the features, as there: in half precision ties are common, and the lower index wins.
    """
    sets = _Sets(tokens, budget, start, params.tile_scope == "global")
    features = tokens.features
    if features.device.type == "cpu" or features.dtype == torch.float32:
        known = tokens.cosine if sets.across else tokens.tile_cosine
        cosine = known.to(features.dtype, copy=True)
    else:
        # Also where cosines are known, so that the choice does not depend on what is cached.
        cosine = half_cosines(sets.of(features), sets.of(tokens.norm), sets.per_image)
    distance = cosine.neg_().add_(1)
    count = sets.shares[0]
    if start.indices.shape[1]:
        nearest = sets.nearest_given(distance)
        return sets.join(farthest_points(distance, count, Chosen(nearest, sets.closed)))
    # The nearest token is the token itself, so the second smallest distance is that to the nearest
    # neighbour. Like the published code, this does not mask the diagonal.
    second = _second_smallest(distance)
    # Relative: where every token has a duplicate, second distances are only rounding, as published.
    seed = argmax_within(second, relative=True)[0][:, None]
    nearest = gather_rows(distance, seed)[:, 0]
    taken = sets.closed.scatter(1, seed, True)
    more = farthest_points(distance, count - 1, Chosen(nearest, taken))
    return sets.join(torch.cat([seed, more], dim=1))


def _second_smallest(distance: Tensor) -> Tensor:
    """Second smallest number of each column, ``(R, n, n) -> (R, n)``; of a single one, that one.

    ``topk`` copies the matrix, and takes 1.6 times as long on a CPU.
    """
    if distance.shape[1] == 1:
        return distance[:, 0]
    smallest, row = distance.min(dim=1, keepdim=True)
    distance.scatter_(1, row, torch.inf)
    second = distance.amin(dim=1)
    distance.scatter_(1, row, smallest)
    return second


class _NormParams(PolicyParams):
    """Parameters of the norm."""

    tile_scope: TileScope = Field("global", description=_SCOPE)


@_greedy_policy(_NormParams, cost=3.0)
def _norm(
    params: _NormParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """The tokens of largest norm: a control, not a published method."""
    sets = _Sets(tokens, budget, start, params.tile_scope == "global")
    norm = sets.of(tokens.norm[:, :, 0].float()).masked_fill(sets.closed, -1.0)
    return sets.join(rank_descending(norm)[:, : sets.shares[0]])


class _CDPrunerParams(PolicyParams):
    """Parameters of CDPruner."""

    theta: float | None = Field(
        None,
        ge=0.0,
        le=0.95,
        description="weight exp(theta r / (2 - 2 theta)) of the normalised relevance r; null: r, "
        "as published",
    )


@_greedy_policy(_CDPrunerParams, needs=frozenset({"instruction"}), cost=8.5)
def _cdpruner(
    params: _CDPrunerParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """Greedy DPP, kernel diag(r) S diag(r), per tile: cosines S, relevance r normalised over tiles.

    Source: Zhang et al., "CDPruner" (NeurIPS 2025), and its published code, which is followed where
    paper and code differ (the 1e-6 in the numerator, joint normalisation over tiles).
    """
    relevance = min_max_normalise(tokens.require_instruction().relevance(), offset=1e-6)
    sets = _Sets(tokens, budget, start)
    return sets.pick_by_map(
        tokens.tile_cosine, sets.of(sharpen(relevance, params.theta))
    )


class _PivotedQRParams(PolicyParams):
    """Parameters of pivoted QR."""

    relevance: float = Field(
        0.0,
        ge=0.0,
        le=16.0,
        description="weight of relevance, by which lengths grow; 0: the question is not read",
    )
    tile_scope: TileScope = Field("per_tile", description=_SCOPE)


class _PivotedQRCoreParams(_PivotedQRParams):
    """Parameters of pivoted QR without the question."""

    relevance: Literal[0] = Field(0, description="a core reads no question")


@_greedy_policy(
    _PivotedQRParams,
    needs=frozenset({"instruction"}),
    reads=lambda params: frozenset({"instruction"} if params.relevance else ()),
    core=_PivotedQRCoreParams,
    cost=27.5,
)
def _pivoted_qr(
    params: _PivotedQRParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """Pivots of a QR decomposition: the token of longest residual after projection on the picks.

    Source: Businger and Golub, "Linear least squares solutions by Householder transformations"
    (1965), here as greedy MAP on L = diag(l) S diag(l) with the lengths l and cosines S of the
    tokens. As a pruning method it is this project's. A length is multiplied by 1 + relevance * r,
    with r normalised over all tiles.
    """
    sets = _Sets(tokens, budget, start, params.tile_scope == "global")
    norm = tokens.norm[:, :, 0].float()
    longest = norm.amax(dim=1, keepdim=True).clamp_min(torch.finfo(norm.dtype).tiny)
    length = norm / longest
    if params.relevance:
        relevance = min_max_normalise(tokens.require_instruction().relevance())
        length = length * (1 + params.relevance * relevance)
    similarity = tokens.cosine if sets.across else tokens.tile_cosine
    return sets.pick_by_map(similarity, sets.of(length))


class _OTPruneParams(PolicyParams):
    """Parameters of OTPrune."""

    gamma: float = Field(
        0.01,
        gt=0.0,
        le=100.0,
        description="weight of the tokens' kernel beside identity",
    )


@_greedy_policy(_OTPruneParams, cost=42.0)
def _otprune(
    params: _OTPruneParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """Greedy log-determinant of I + gamma S S, with S = Y Y^T and channels of Y of norm 1.

    Source: Chen et al., "OTPrune" (CVPR 2026, arXiv 2602.20205), and its published code.
    """
    sets = _Sets(tokens, budget, start)
    rows = sets.of(tokens.features).float()
    units = rows / rows.norm(dim=1, keepdim=True).clamp_min(
        torch.finfo(rows.dtype).tiny
    )
    kernels = []
    # One set at a time: in a batched product a sum may be rounded differently.
    for unit in units.unbind():
        gram = unit @ unit.T
        kernel = (gram @ gram).mul_(params.gamma)
        kernel.diagonal().add_(1)
        kernels.append(kernel)
    kernel = torch.stack(kernels)
    quality = kernel.diagonal(dim1=1, dim2=2).sqrt()
    similarity = kernel.div_(quality[:, :, None]).div_(quality[:, None, :])
    return sets.pick_by_map(similarity, quality)


class _CentredParams(PolicyParams):
    """Parameters of both Cen policies."""

    scale_variance: bool = Field(
        False,
        description="divide every channel by its deviation in the image first, as published for "
        "Qwen2.5-VL",
    )
    weight: WeightMap = Field(
        "minmax",
        description="weight of a token by its mean dissimilarity to the others; sigmoid: as "
        "published for Qwen2.5-VL; none: all alike",
    )
    centre: bool = Field(
        True, description="subtract the mean token before tokens are compared"
    )
    tile_scope: TileScope = Field("per_tile", description=_SCOPE)

    def compare(self, sets: _Sets) -> tuple[Tensor, Tensor]:
        """Similarity ``(R, n, n)`` and weight ``(R, n)`` of the tokens of each set, in float32.

        Source: "Cen-Prune" (arXiv 2608.30263), the paper alone: there is no code.
        """
        rows = sets.of(sets.tokens.features).float()
        if self.scale_variance:
            rows = scale_to_unit_variance(rows)
        tiles = sets.per_image
        compared = subtract_mean(rows, tiles) if self.centre else rows
        similarity = plain_cosines(compared, tiles)
        return similarity, map_weight(mean_dissimilarity(rows, tiles), self.weight)


class _CenCDPrunerParams(_CentredParams):
    """Parameters of Cen-CDPruner."""

    relevance: bool = Field(True, description="false: weigh by dissimilarity alone")


class _CenCDPrunerCoreParams(_CenCDPrunerParams):
    """Parameters of Cen-CDPruner without the question."""

    relevance: Literal[False] = Field(False, description="a core reads no question")


@_greedy_policy(
    _CenCDPrunerParams,
    needs=frozenset({"instruction"}),
    reads=lambda params: frozenset({"instruction"} if params.relevance else ()),
    core=_CenCDPrunerCoreParams,
    cost=33.6,
)
def _cen_cdpruner(
    params: _CenCDPrunerParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """Greedy DPP, kernel diag(q) S diag(q): centred cosines S; q, relevance times dissimilarity."""
    sets = _Sets(tokens, budget, start, params.tile_scope == "global")
    similarity, quality = params.compare(sets)
    if params.relevance:
        relevance = tokens.require_instruction().relevance()
        quality = quality * sets.of(min_max_normalise(relevance, offset=1e-6))
    return sets.pick_by_map(similarity, quality)


class _CenDivPruneParams(_CentredParams):
    """Parameters of Cen-DivPrune."""


@_greedy_policy(_CenDivPruneParams, cost=34.9)
def _cen_divprune(
    params: _CenDivPruneParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """Max-min distance of centred tokens, weighted by dissimilarity to all others."""
    sets = _Sets(tokens, budget, start, params.tile_scope == "global")
    similarity, weight = params.compare(sets)
    distance = distances(similarity)
    # From the first weighted distance of at most the floor on, tokens are picked by weight.
    chosen = Chosen(sets.nearest_given(distance), sets.closed)
    return sets.join(
        weighted_farthest_points(distance, weight, sets.shares[0], chosen, floor=1e-6)
    )


class _ScopeParams(PolicyParams):
    """Parameters of SCOPE."""

    alpha: float = Field(
        1.0,
        ge=0.0,
        le=4.0,
        description="exponent of the attention that weighs a token's gain",
    )


@_greedy_policy(_ScopeParams, needs=frozenset({"cls_attention", "encoder"}), cost=25.3)
def _scope(
    params: _ScopeParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """Greedy coverage of the encoder's tokens, each gain times the attention of [CLS].

    Source: SCOPE (NeurIPS 2025, arXiv 2510.24214) and its published code.
    """
    sets = _Sets(tokens, budget, start)
    attention = tokens.require_cls_attention().float()
    similarity = plain_cosines(sets.of(tokens.require_encoder()).float())
    picks = greedy_coverage(
        similarity,
        sets.of(attention**params.alpha),
        sets.shares[0],
        covered=_covered_by(similarity, sets.given),
        taken=sets.closed,
        floor=1e-9,  # from the first weighted gain of at most this on, tokens are picked by weight
    )
    return sets.join(picks)


class _MMTokParams(PolicyParams):
    """Parameters of MMTok."""

    alpha: float = Field(
        0.5,
        ge=0.0,
        le=4.0,
        description="weight of covering the image beside covering the words",
    )
    tau_text: float = Field(
        0.02,
        ge=0.005,
        le=1.0,
        description="temperature between words and tokens; published for Qwen2.5-VL: 0.01",
    )
    tau_vision: float = Field(
        0.2, ge=0.005, le=1.0, description="temperature between tokens of the image"
    )
    words: bool = Field(True, description="false: cover the image alone")


class _MMTokCoreParams(_MMTokParams):
    """Parameters of MMTok without the question."""

    words: Literal[False] = Field(False, description="a core reads no question")


@_greedy_policy(
    _MMTokParams,
    needs=frozenset({"encoder", "words"}),
    reads=lambda params: frozenset(
        {"encoder", "words"} if params.words else {"encoder"}
    ),
    core=_MMTokCoreParams,
    cost=26.6,
)
def _mmtok(
    params: _MMTokParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """Greedy coverage of the question's words and of the image's own tokens.

    Source: MMTok (ICLR 2026, arXiv 2508.18264) and its published code.
    """
    sets = _Sets(tokens, budget, start)
    rows = sets.of(tokens.require_encoder())
    covers = (
        cosines(rows, rows.norm(dim=-1, keepdim=True))
        .div_(params.tau_vision)
        .softmax(dim=2)
    )
    # How well each token covers each word, with 0 for padding, and each token of its tile:
    # (B * T, n, W + n).
    degrees = covers.transpose(1, 2) * (params.alpha / rows.shape[1])
    if params.words:
        words = tokens.require_words()
        tiles = tokens.grid.tiles
        embeddings = words.embeddings.to(tokens.output.dtype).repeat_interleave(
            tiles, dim=0
        )
        cosine = cosines_between(sets.of(tokens.output), embeddings)
        used = words.used.repeat_interleave(tiles, dim=0)[:, None, :]
        share = (cosine / params.tau_text).softmax(dim=1)
        share = share / used.sum(dim=2, keepdim=True).clamp_min(1)
        degrees = torch.cat([torch.where(used, share, 0.0), degrees], dim=2)
    picks = greedy_coverage(
        degrees,
        degrees.new_zeros(degrees.shape[:2]),
        sets.shares[0],
        covered=_covered_by(degrees, sets.given),
        taken=sets.closed,
        floor=1e-12,  # from the first gain of at most this on, tokens are picked by index
        scale=False,
    )
    return sets.join(picks)


class _IDPrunerParams(PolicyParams):
    """Parameters of IDPruner."""

    balance: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="share of importance; the rest is dissimilarity (lambda)",
    )
    importance: Literal["attention", "relevance"] = Field(
        "attention", description="attention of [CLS], or relevance to the question"
    )


class _IDPrunerCoreParams(_IDPrunerParams):
    """Parameters of IDPruner without the question."""

    importance: Literal["attention"] = Field(
        "attention", description="a core reads no question"
    )


@_greedy_policy(
    _IDPrunerParams,
    needs=frozenset({"cls_attention", "instruction"}),
    reads=lambda params: frozenset(
        {"cls_attention"} if params.importance == "attention" else {"instruction"}
    ),
    core=_IDPrunerCoreParams,
    cost=29.5,
)
def _idpruner(
    params: _IDPrunerParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """Marginal relevance: the most important tokens that are unlike those picked before.

    Source: IDPruner (arXiv 2602.13315) and its published code in AngelSlim, whose importance is a
    trained network. Here importance is attention or relevance [ours], so its published accuracy
    does not carry over. Picks are by balance * importance - (1 - balance) * similarity to the
    picks; ties go to the lower index.
    """
    sets = _Sets(tokens, budget, start)
    if params.importance == "attention":
        raw = tokens.require_cls_attention().float()
    else:
        raw = tokens.require_instruction().relevance()
    # Importance (B * T, n) in [0, 1], normalised within each tile, with the published 1e-6.
    raw = sets.of(raw)
    low = raw.amin(dim=1, keepdim=True)
    high = raw.amax(dim=1, keepdim=True)
    importance = (raw - low) / (high - low + 1e-6)
    balance = params.balance
    similarity = tokens.precise_tile_cosine
    mask = sets.given
    free = ~sets.closed

    rows, size = importance.shape
    offset = row_offsets(rows, size, importance.device)
    flat = similarity.reshape(rows * size, size)
    closest = -sets.nearest_given(-similarity)
    begins = ~mask.any(dim=1, keepdim=True)
    picks = [torch.empty(rows, 0, dtype=torch.int64, device=importance.device)]
    for _ in range(sets.shares[0]):
        score = balance * importance - (1 - balance) * closest
        # Where nothing is given or picked yet, the most important token comes first.
        score = torch.where(begins, importance, score)
        score = score.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        # NaN ranks below any number, but above a token that is taken.
        score = torch.where(
            free, score.clamp_min(torch.finfo(score.dtype).min), -torch.inf
        )
        pick, _ = argmax_within(score)
        picks.append(pick[:, None])
        free = free.scatter(1, pick[:, None], False)
        row = flat.index_select(0, offset + pick)
        closest = torch.where(begins, row, torch.fmax(closest, row))
        begins = torch.zeros_like(begins)
    return sets.join(torch.cat(picks, dim=1))
