"""FSR: focus on relevant and attended tokens, scan for the rest of the image, refine by merging.

Source: "Focus, Scan, Refine" (arXiv 2602.05809), the paper's formulas: there is no code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.greedy import weighted_farthest_points
from vllm_autoprune.ops.rowwise import gather_rows, min_max_normalise, rank_descending
from vllm_autoprune.ops.similarity import matmul_each
from vllm_autoprune.tpdsl.atoms.scoring import instruction_relevance
from vllm_autoprune.tpdsl.base_policy import (
    Given,
    PolicyParams,
    PublishedSelection,
    ReferenceSelection,
    base_policy,
)
from vllm_autoprune.tpdsl.tokens import (
    Need,
    TileGroup,
    VisualTokens,
    join_groups,
    join_tiles,
    split_over_tiles,
    tile_groups,
)

FLOOR = 1e-6
"""Distance at or below which the other tokens come by priority."""


class _FSRParams(PolicyParams):
    """Parameters of FSR."""

    alpha: float = Field(
        3.0, ge=0.0, le=8.0, description="exponent of relevance in a token's priority; 0: none"
    )
    beta: float = Field(
        1.0, ge=0.0, le=8.0, description="exponent of the attention of [CLS] in the priority"
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


def _reads(params: _FSRParams) -> frozenset[Need]:
    attention: frozenset[Need] = frozenset({"cls_attention"})
    return attention | {"instruction"} if params.alpha > 0 else attention


def _continue(params: _FSRParams, tokens: VisualTokens, budget: int, start: Given) -> Tensor:
    """Tokens of highest priority: the scan has no part in a continuation [ours]."""
    order = tokens.by_tile(_priority(params, tokens).masked_fill(start.closed, -torch.inf))
    shares = split_over_tiles(budget, tokens.grid.tiles)
    picks = rank_descending(order)[:, : shares[0]]
    return join_tiles(picks, tokens, shares, start.next_tile(tokens))


def _native(params: _FSRParams, tokens: VisualTokens, budget: int) -> PublishedSelection:
    """Per tile, focus by priority and then the scan, with merged rows in float32."""
    share = budget // tokens.grid.tiles
    group = TileGroup(0, tokens.grid.tiles, share)
    chosen = _choose(params, tokens, group)
    rows = _merge_into_scan(params, chosen, group.of(tokens.output, tokens).float())
    picks = group.within_image(chosen.picks, tokens).reshape(tokens.batch, -1)
    return PublishedSelection(tuple(picks), tuple(rows.reshape(*picks.shape, -1)))


@base_policy(
    _FSRParams,
    needs=frozenset({"cls_attention", "instruction"}),
    native=_native,
    continuation=_continue,
    reads=_reads,
    core=_FSRCoreParams,
)
def fsr(params: _FSRParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    """Tokens of high priority, then those farthest from them, with their neighbours merged in."""
    groups = tile_groups(tokens, budget)
    picks, merged = [], []
    for group in groups:
        chosen = _choose(params, tokens, group)
        picks.append(group.within_image(chosen.picks, tokens))
        if params.kappa > 0:
            rows = group.of(tokens.output, tokens).float()
            merged.append(_merge_into_scan(params, chosen, rows).to(tokens.output.dtype))
    return ReferenceSelection(
        join_groups(picks, groups, tokens), join_groups(merged, groups, tokens) if merged else None
    )


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Picks ``(R, K)`` of R tiles: the first focus ``(R, 1)`` of them, then the scan.

    priority ``(R, n)``; similarity ``(R, n, n)``.
    """

    picks: Tensor
    focus: Tensor
    priority: Tensor
    similarity: Tensor


def _priority(params: _FSRParams, tokens: VisualTokens) -> Tensor:
    """phi = relevance^alpha * attention^beta ``(B, N)``, attention normalised in each tile."""
    attention = min_max_normalise(tokens.by_tile(tokens.require_cls_attention().float()))
    phi = tokens.by_image(attention**params.beta)
    if params.alpha == 0:
        return phi
    instruction = tokens.require_instruction()
    relevance = instruction.sign * instruction_relevance(instruction)
    return phi * min_max_normalise(relevance) ** params.alpha


def _choose(params: _FSRParams, tokens: VisualTokens, group: TileGroup) -> _Chosen:
    phi = group.of(_priority(params, tokens), tokens)
    count = group.share
    similarity = group.of(tokens.by_image(tokens.precise_tile_cosine), tokens)
    # The least number of tokens whose priority reaches the share rho of all; none of nothing.
    reached = phi.sort(dim=1, descending=True, stable=True).values.double().cumsum(dim=1)
    wanted = params.rho * reached[:, -1:]
    focus = torch.where(wanted > 0, (reached < wanted).sum(dim=1, keepdim=True) + 1, 0)
    focus = focus.clamp_max(count)
    leading = rank_descending(phi)[:, :count]
    leading = leading.where(torch.arange(count, device=phi.device) < focus, -1)
    picks = weighted_farthest_points(
        1 - similarity,
        torch.ones_like(phi),
        count,
        nearest=torch.full_like(phi, torch.inf),
        taken=torch.zeros_like(phi, dtype=torch.bool),
        floor=FLOOR,
        leading=leading,
        fill=phi,
    )
    return _Chosen(picks, focus, phi, similarity)


def _merge_into_scan(params: _FSRParams, chosen: _Chosen, rows: Tensor) -> Tensor:
    """Rows ``(R, K, D)`` of the picks, from rows ``(R, n, D)`` float32 of all tokens.

    Each other token goes with its most similar pick of the scan; the most similar of these pairs
    are merged, by priority.
    """
    picks, count = chosen.picks, chosen.picks.shape[1]
    size = rows.shape[1]
    in_scan = torch.arange(count, device=picks.device) >= chosen.focus
    towards = chosen.similarity.gather(2, picks[:, None, :].expand(-1, size, -1))
    towards = towards.masked_fill(~in_scan[:, None, :], -torch.inf)
    nearness, owner = towards.max(dim=2)
    nearness = nearness.scatter(1, picks, -torch.inf)
    turn = torch.arange(size, device=picks.device).expand(len(picks), -1)
    place = torch.zeros_like(turn).scatter_(1, rank_descending(nearness), turn)
    pairs = (params.kappa * in_scan.sum(dim=1, keepdim=True).double()).floor()
    merges = (place < pairs) & (nearness > -torch.inf)
    share = torch.where(merges, chosen.priority, 0.0)
    weights = rows.new_zeros(len(picks), size, count).scatter_(
        2, owner[:, :, None], share[:, :, None]
    )
    pick_priority = chosen.priority.gather(1, picks)
    total = pick_priority + weights.sum(dim=1)
    plain = gather_rows(rows, picks)
    mixed = pick_priority[:, :, None] * plain + matmul_each(weights.transpose(1, 2), rows)
    changed = in_scan & (total > 0) & (weights.sum(dim=1) > 0)
    return torch.where(changed[:, :, None], mixed / total[:, :, None], plain)
