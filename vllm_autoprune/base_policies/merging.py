"""Base policies that merge other tokens into the kept ones, most of them before the projector.

In shapes, R = B * T tiles of n tokens, Dv is the tower's width, and D that of projected features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.farthest import (
    distances,
    weighted_farthest_points,
)
from vllm_autoprune.ops.farthest_torch import Chosen
from vllm_autoprune.ops.rowwise import (
    find_outliers,
    gather_rows,
    indices_from_mask,
    mask_from_indices,
    min_max_normalise,
    rank_descending,
)
from vllm_autoprune.ops.similarity import cosines_with, matmul_each
from vllm_autoprune.tpdsl.base_policy import (
    Given,
    PolicyParams,
    ReferenceSelection,
    base_policy,
)
from vllm_autoprune.tpdsl.tokens import (
    TileGroup,
    VisualTokens,
    split_over_tiles,
)


@dataclass(frozen=True, slots=True)
class TileRows:
    """Rows of R tiles, before the projector.

    picks ``(R, P)`` are indices within the tile; merged ``(R, m, Dv)`` replace the rows of the last
    m picks; extra ``(R, E, Dv)`` are rows that correspond to no single token.
    """

    picks: Tensor
    merged: Tensor
    extra: Tensor


def merge_by_tile(
    tokens: VisualTokens, budget: int, run: Callable[[TileGroup], TileRows]
) -> ReferenceSelection:
    """Run a method on every tile with its share of the budget, then project the merged rows.

    ``run`` gets the tiles of one share and returns P + E = share rows for each of them.
    """
    groups = TileGroup.split(tokens, budget)
    picks = []
    rows = []
    extra = []
    for group in groups:
        result = run(group)
        unprojected = torch.cat([result.merged, result.extra], dim=1).to(
            tokens.require_tower().patches.dtype
        )
        projected = tokens.require_tower().projected(unprojected)
        merged, added = projected.to(tokens.output.dtype).split(
            [result.merged.shape[1], result.extra.shape[1]], dim=1
        )
        plain = result.picks[:, : result.picks.shape[1] - merged.shape[1]]
        untouched = gather_rows(group.of(tokens.output, tokens), plain)
        picks.append(group.within_image(result.picks, tokens))
        rows.append(torch.cat([untouched, merged], dim=1))
        extra.append(added)
    joined = TileGroup.join(extra, groups, tokens)
    return ReferenceSelection(
        picks=TileGroup.join(picks, groups, tokens),
        merged=TileGroup.join(rows, groups, tokens),
        extra=joined if joined.shape[1] else None,
    )


class _VisionZipParams(PolicyParams):
    """Parameters of VisionZip."""

    contextual: int | None = Field(
        None,
        ge=0,
        le=640,
        description="rows per tile that others are merged into; null: 10 of 64, at least one",
    )
    patch_only: bool = Field(
        True,
        description="keep one more patch instead of the [CLS] row of the published code",
    )

    def split(self, budget: int) -> tuple[int, int]:
        """Numbers of dominant (at least one) and contextual rows of a tile with this budget."""
        wanted = (
            max(1, 10 * budget // 64) if self.contextual is None else self.contextual
        )
        contextual = min(wanted, budget - 1)
        return budget - contextual, contextual


@base_policy(_VisionZipParams, needs=frozenset({"cls_attention", "tower"}), cost=8.9)
def _visionzip(
    params: _VisionZipParams, tokens: VisualTokens, budget: int
) -> ReferenceSelection:
    """Patches with most attention from [CLS], then evenly spaced ones with the rest merged in.

    Source: Yang et al., "VisionZip" (CVPR 2025), and its published code, which adds the mean of the
    merged tokens to their target where the paper averages all of them. Computed in the dtype of the
    tower, as published: in half precision ties between targets are common, and the first wins.
    """
    tower = tokens.require_tower()

    def run(group: TileGroup) -> TileRows:
        dominant, contextual = params.split(group.share)
        # With a single dominant row, keep a patch: the row of [CLS] alone would leave no token.
        by_cls = not params.patch_only and dominant > 1
        dominant -= by_cls
        patches = group.of(tower.patches, tokens)
        extra = group.cls_rows(tokens) if by_cls else patches[:, :0]
        top = rank_descending(group.of(tokens.require_cls_attention(), tokens))[
            :, :dominant
        ]
        if contextual == 0:
            return TileRows(top, patches[:, :0], extra)
        size = patches.shape[1]
        remaining = patches.shape[1] - dominant
        in_top = mask_from_indices(top, size)
        step = max(1, remaining // contextual)
        targets = indices_from_mask(~in_top, remaining)[:, : contextual * step : step]
        picked = in_top | mask_from_indices(targets, size)
        sources = indices_from_mask(~picked, remaining - contextual)

        keys = group.of(tower.keys, tokens)
        unit = keys / keys.norm(dim=-1, keepdim=True).clamp_min(
            torch.finfo(keys.dtype).tiny
        )
        towards = gather_rows(unit, targets).transpose(1, 2)
        nearest = matmul_each(gather_rows(unit, sources), towards).argmax(dim=2)
        members = patches.new_zeros(*nearest.shape, contextual)
        members.scatter_(2, nearest[:, :, None], 1.0)
        total = matmul_each(members.transpose(1, 2), gather_rows(patches, sources))
        mean = total / members.sum(dim=1).clamp_min(1)[:, :, None]
        merged = gather_rows(patches, targets) + mean
        return TileRows(torch.cat([top, targets], dim=1), merged, extra)

    return merge_by_tile(tokens, budget, run)


class _TrimParams(PolicyParams):
    """TRIM has no parameters."""


@base_policy(_TrimParams, needs=frozenset({"instruction", "tower"}), cost=8.1)
def _trim(params: _TrimParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    """The K - 1 patches most similar to the instruction, and the mean of all others.

    Source: Song et al., "Less is More: A Simple yet Effective Token Reduction Method" (COLING
    2025), and its published code, which takes minus the dot product where the paper says cosine.
    """
    instruction = tokens.require_instruction()
    # Signed dot products (B, N) with the text; neither side is normalised, as published. Several
    # text segments are represented by their mean [ours]: the published code truncates the text.
    used = instruction.segments[:, :, None]
    total = torch.where(used, instruction.text.float(), 0.0).sum(dim=1, keepdim=True)
    text = total / used.sum(dim=1, keepdim=True).clamp_min(1)
    dots = matmul_each(instruction.patches.float(), text.transpose(1, 2))[:, :, 0]
    score = instruction.sign * dots

    def run(group: TileGroup) -> TileRows:
        # With a single row, keep a patch instead of the mean of all.
        count = max(1, group.share - 1)
        picks = rank_descending(group.of(score, tokens))[:, :count]
        patches = group.of(tokens.require_tower().patches, tokens)
        size = patches.shape[1]
        dropped = (~mask_from_indices(picks, size)).float()[:, None, :]
        mean = matmul_each(dropped, patches.float()) / max(1, size - count)
        return TileRows(picks, patches[:, :0], mean[:, : group.share - count])

    return merge_by_tile(tokens, budget, run)


_NEIGHBOURS = 32
"""Number of most similar tokens that are merged into each kept one."""


class _PruMergePlusParams(PolicyParams):
    """Parameters of PruMerge+."""

    plus: bool = Field(
        True,
        description="false: PruMerge, which keeps tokens by attention alone, without samples",
    )
    drop_extra: bool = Field(
        False, description="keep one more token instead of the sum of the dropped ones"
    )


@base_policy(_PruMergePlusParams, needs=frozenset({"tower", "next_layer"}), cost=13.9)
def _prumerge_plus(
    params: _PruMergePlusParams, tokens: VisualTokens, budget: int
) -> ReferenceSelection:
    """Outliers of [CLS] attention, then evenly spaced tokens, with neighbours merged in.

    Source: Shang et al., "LLaVA-PruMerge" (ICCV 2025), and its published code, which adds an
    unnormalised sum of neighbours to each kept token where the paper averages. The published number
    of tokens depends on the image; here tokens are chosen by a rule of this project [ours], with
    exactly K rows.
    """
    next_layer = tokens.require_next_layer()

    def run(group: TileGroup) -> TileRows:
        attention = group.of(next_layer.attention, tokens)
        # With a single row, keep a token, because there has to be one to merge into.
        alone = params.drop_extra or group.share == 1
        count = group.share if alone else group.share - 1
        picks = (
            _spread(attention, count)
            if params.plus
            else rank_descending(attention)[:, :count]
        )
        patches = group.of(tokens.require_tower().patches, tokens)
        merged, extra = _merge_neighbours(
            attention, group.of(next_layer.keys, tokens), patches, picks
        )
        return TileRows(picks, merged, extra[:, :0] if alone else extra)

    return merge_by_tile(tokens, budget, run)


def _spread(attention: Tensor, count: int) -> Tensor:
    """Picks ``(R, count)``: outliers of attention ``(R, n)``, then evenly spaced tokens [ours].

    Shapes do not depend on the number of outliers, so this does not synchronise with the device.
    """
    size = attention.shape[1]
    order = rank_descending(attention)
    above = find_outliers(attention).sum(dim=1, keepdim=True).clamp_max(count)
    turn = torch.arange(count, device=attention.device)
    positions = torch.arange(size, device=attention.device)
    outlying = torch.zeros_like(order, dtype=torch.bool)
    outlying.scatter_(1, order, (positions < above).expand_as(order))
    outliers_last = torch.sort(outlying.to(torch.uint8), dim=1, stable=True).indices
    remaining = size - above
    samples = count - above
    step = (
        ((turn - above).clamp_min(0) * 2 + 1) * remaining // (2 * samples.clamp_min(1))
    )
    sampled = outliers_last.gather(1, step.clamp_max(size - 1))
    return torch.where(turn < above, order[:, :count], sampled)


def _merge_neighbours(
    attention: Tensor, keys: Tensor, patches: Tensor, picks: Tensor
) -> tuple[Tensor, Tensor]:
    """Merged rows ``(R, P, Dv)`` of the picks and sum ``(R, 1, Dv)`` of dropped rows, float32.

    Row i is x_i + sum of a_j x_j over the neighbours j of i, kept or not; x are the rows before
    merging.
    """
    size = attention.shape[1]
    similarity = cosines_with(gather_rows(keys, picks), keys)
    similarity = similarity.scatter(2, picks[:, :, None], -torch.inf)
    near = rank_descending(similarity)[:, :, : min(_NEIGHBOURS, size - 1)]
    weight = attention.float()[:, None, :]
    inward = torch.zeros_like(similarity)
    inward.scatter_(2, near, weight.expand_as(similarity).gather(2, near))
    dropped = weight.masked_fill(mask_from_indices(picks, size)[:, None, :], 0.0)
    rows = patches.float()
    sums = matmul_each(torch.cat([inward, dropped], dim=1), rows)
    return gather_rows(rows, picks) + sums[:, :-1], sums[:, -1:]


_SCAN_FLOOR = 1e-6
"""Distance at or below which the remaining tokens are picked by priority."""


class _FSRParams(PolicyParams):
    """Parameters of FSR."""

    alpha: float = Field(
        3.0,
        ge=0.0,
        le=8.0,
        description="exponent of relevance in a token's priority; 0: none",
    )
    beta: float = Field(
        1.0,
        ge=0.0,
        le=8.0,
        description="exponent of the attention of [CLS] in the priority",
    )
    rho: float = Field(
        0.9, ge=0.0, le=1.0, description="share of all priority that the focus reaches"
    )
    kappa: float = Field(
        1.0,
        ge=0.0,
        le=64.0,
        description="tokens merged into those of the scan, per token of the scan; 0: none",
    )


class _FSRCoreParams(_FSRParams):
    """Parameters of FSR without the question."""

    alpha: float = Field(0.0, ge=0.0, le=0.0, description="a core reads no question")


def _continue_fsr(
    params: _FSRParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """Tokens of highest priority. The scan is not part of a continuation [ours]."""
    priority = tokens.by_tile(
        _fsr_priority(params, tokens).masked_fill(start.closed, -torch.inf)
    )
    shares = split_over_tiles(budget, tokens.grid.tiles)
    picks = rank_descending(priority)[:, : shares[0]]
    return tokens.join_tiles(picks, shares, start.next_tile(tokens))


@base_policy(
    _FSRParams,
    needs=frozenset({"cls_attention", "instruction"}),
    continuation=_continue_fsr,
    reads=lambda params: frozenset(
        {"cls_attention", "instruction"} if params.alpha > 0 else {"cls_attention"}
    ),
    core=_FSRCoreParams,
    cost=41.3,
)
def _fsr(params: _FSRParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    """Tokens of high priority, then those farthest from them, with their neighbours merged in.

    Source: "Focus, Scan, Refine" (arXiv 2602.05809), the paper's formulas: there is no code.
    """
    groups = TileGroup.split(tokens, budget)
    parts = [_focus_and_scan(params, tokens, group) for group in groups]
    picks = [
        group.within_image(part[0], tokens)
        for group, part in zip(groups, parts, strict=True)
    ]
    merged = [part[1] for part in parts]
    return ReferenceSelection(
        TileGroup.join(picks, groups, tokens),
        TileGroup.join(merged, groups, tokens) if params.kappa > 0 else None,
    )


def _fsr_priority(params: _FSRParams, tokens: VisualTokens) -> Tensor:
    """phi = relevance^alpha * attention^beta ``(B, N)``, attention normalised in each tile."""
    attention = min_max_normalise(
        tokens.by_tile(tokens.require_cls_attention().float())
    )
    phi = tokens.by_image(attention**params.beta)
    if params.alpha == 0:
        return phi
    return (
        phi
        * min_max_normalise(tokens.require_instruction().relevance()) ** params.alpha
    )


def _focus_and_scan(
    params: _FSRParams, tokens: VisualTokens, group: TileGroup
) -> tuple[Tensor, Tensor]:
    """Picks ``(R, K)`` of the tiles, the focus before the scan, and their rows ``(R, K, D)``.

    Each other token is paired with its most similar pick of the scan. The most similar of these
    pairs are merged, weighted by priority. With ``kappa`` 0 nothing is merged and there are no
    rows.
    """
    phi = group.of(_fsr_priority(params, tokens), tokens)
    count = group.share
    similarity = group.of(tokens.by_image(tokens.precise_tile_cosine), tokens)
    # Smallest number of tokens whose priority sums to the share rho of the total; 0 if the total is
    # 0.
    reached = (
        phi.sort(dim=1, descending=True, stable=True).values.double().cumsum(dim=1)
    )
    wanted = params.rho * reached[:, -1:]
    focus = torch.where(wanted > 0, (reached < wanted).sum(dim=1, keepdim=True) + 1, 0)
    focus = focus.clamp_max(count)
    leading = rank_descending(phi)[:, :count]
    leading = leading.where(torch.arange(count, device=phi.device) < focus, -1)
    picks = weighted_farthest_points(
        distances(similarity.clone()),
        torch.ones_like(phi),
        count,
        Chosen.none(phi),
        floor=_SCAN_FLOOR,
        leading=leading,
        fill=phi,
    )
    if params.kappa == 0:
        return picks, tokens.output[:, :0]

    rows = group.of(tokens.output, tokens).float()
    size = phi.shape[1]
    in_scan = torch.arange(count, device=picks.device) >= focus
    towards = similarity.gather(2, picks[:, None, :].expand(-1, size, -1))
    nearness, owner = towards.masked_fill(~in_scan[:, None, :], -torch.inf).max(dim=2)
    nearness = nearness.scatter(1, picks, -torch.inf)
    turn = torch.arange(size, device=picks.device).expand(len(picks), -1)
    position = torch.zeros_like(turn).scatter_(1, rank_descending(nearness), turn)
    pairs = (params.kappa * in_scan.sum(dim=1, keepdim=True).double()).floor()
    merges = (position < pairs) & (nearness > -torch.inf)
    share = torch.where(merges, phi, 0.0)
    weights = rows.new_zeros(len(picks), size, count)
    weights.scatter_(2, owner[:, :, None], share[:, :, None])
    priority = phi.gather(1, picks)
    plain = gather_rows(rows, picks)
    total = priority + weights.sum(dim=1)
    mixed = priority[:, :, None] * plain + matmul_each(weights.transpose(1, 2), rows)
    changed = in_scan & (total > 0) & (weights.sum(dim=1) > 0)
    merged = torch.where(changed[:, :, None], mixed / total[:, :, None], plain)
    return picks, merged.to(tokens.output.dtype)
