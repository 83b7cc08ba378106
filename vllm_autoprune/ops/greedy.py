"""Greedy selection, batched and without host syncs: coverage and DPPs.

Greedy MAP of a determinantal point process follows Chen et al. 2018 (incremental Cholesky
factorisation), as CDPruner uses it. The rules beyond the rank of the kernel are [ours]: the
published loop returns fewer than K tokens there. The kernel L = diag(q) S diag(q) is never formed:
its Cholesky factor is diag(q) times that of S, so only S is factorised, and the gain of token j is
q_j^2 d_j with d_j the residual of S_jj.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from vllm_autoprune.ops.rowwise import ALIGNED, argmax_within, row_offsets

HUGE = 2.0**100
"""Number that replaces an infinite or NaN weight when tokens are ordered by weight alone."""


def fill_by_weight(
    picks: Tensor, gains: Tensor, weight: Tensor, eligible: Tensor | None, floor: float
) -> Tensor:
    """Replace the picks from the first gain of at most ``floor``, or NaN, on by descending weight.

    picks and gains ``(B, count)``, weight ``(B, N)``, eligible ``(B, N)`` bool. Returns ``(B,
    count)``: first the picks that are not replaced, in their order, then the replacements; equal
    weights go to the lower index. ``count`` must not exceed the number of eligible tokens.
    """
    count = picks.shape[1]
    tokens = weight.shape[1]
    key = weight.float().nan_to_num(nan=HUGE, posinf=HUGE, neginf=-HUGE)
    if eligible is not None:
        key = key.masked_fill(~eligible, -torch.inf)
    priority = 2 * HUGE * torch.arange(count, 0, -1, dtype=key.dtype, device=key.device)
    # The extra column receives the priorities of the picks to replace, and is cut off again.
    key = functional.pad(key, (0, 1))
    stands = (gains > floor).cumprod(dim=1) > 0
    key.scatter_(1, picks.where(stands, tokens), priority.expand_as(picks))
    return key[:, :tokens].argsort(dim=1, descending=True, stable=True)[:, :count]


def greedy_coverage(
    degrees: Tensor,
    weight: Tensor,
    count: int,
    *,
    covered: Tensor,
    taken: Tensor,
    floor: float,
    scale: bool = True,
) -> Tensor:
    """Greedy maximum coverage: each pick is the candidate that adds most to what is covered.

    degrees ``(B, N, R)`` say how well each candidate covers each row, and covered ``(B, R)`` how
    well earlier picks cover it; taken ``(B, N)`` bool excludes candidates. With ``scale``, gains
    are multiplied by weight ``(B, N)``. From the first gain of at most ``floor`` on, picks are by
    descending weight. Returns ``(B, count)`` int64 in pick order, unique; ties go to the lower
    index (:func:`argmax_within`). ``count`` must not exceed the number of candidates that are not
    taken.
    """
    batch = degrees.shape[0]
    if count == 0:
        return torch.empty(batch, 0, dtype=torch.int64, device=degrees.device)
    picks = []
    gains = []
    # One image at a time: its picks and gains (count,) are appended one after another.
    for by_row, scales, reached, closed in zip(
        degrees, weight, covered, taken, strict=True
    ):
        excluded = closed.clone()
        added = torch.empty_like(by_row)
        for _ in range(count):
            torch.sub(by_row, reached, out=added)
            total = added.clamp_min_(0).sum(dim=1)
            if scale:
                total = total * scales
            pick, gain = argmax_within(
                total.masked_fill(excluded, -torch.inf)[None], relative=True
            )
            picks.append(pick)
            gains.append(gain)
            excluded.index_fill_(0, pick, True)
            reached = torch.maximum(reached, by_row.index_select(0, pick)[0])
    order = torch.cat(picks).view(batch, count)
    gained = torch.cat(gains).view(batch, count)
    return fill_by_weight(order, gained, weight, ~taken, floor)


EXHAUSTED = 1e-10
"""Gain at or below which the rank of the kernel counts as exhausted."""

DIVISOR = 1e-12
"""Lower bound of a pivot that is divided by: the residual of an anchor may be zero."""

_DEPENDENT = 1e-5
"""Residual at or below which a fixed token is a linear combination of the tokens before it, so that
its row is only rounding."""

UNIT = 2**-6
"""Difference from 1 within which a diagonal entry counts as a rounded 1. It is up to 9e-3 where
rows were divided by their norm in bfloat16."""

GIVEN = -0.5
"""Residual at or below which a token is one that was conditioned on, marked by -1. The residuals of
other tokens are negative only by rounding."""


@dataclass(frozen=True, slots=True)
class Conditioned:
    """Similarity S of B images, conditioned on A fixed tokens each: S minus its projection on them.

    Quality only scales rows and columns of L = diag(q) S diag(q), so this holds for every question
    about an image. factors ``(B, A, N)`` are rows of the Cholesky factor; residual ``(B, N)`` is
    the conditioned diagonal, and -1 for the fixed tokens.
    """

    factors: Tensor
    residual: Tensor

    @classmethod
    def on(
        cls, similarity: Tensor, fixed: Tensor, valid: Tensor | None = None
    ) -> Conditioned:
        """Condition similarity ``(B, N, N)`` float32 on the distinct tokens of fixed ``(B, A)``.

        valid ``(B, A)`` bool is false for entries of ``fixed`` to ignore, where images have
        different numbers of fixed tokens.
        """
        batch, tokens, _ = similarity.shape
        count = fixed.shape[1]
        diagonal = similarity.diagonal(dim1=1, dim2=2)
        residual = diagonal.clone(memory_format=torch.contiguous_format)
        factors = similarity.new_zeros(batch, tokens, _round_up(count))
        flat = residual.view(-1)
        columns = factors.unbind(dim=2)
        offset = row_offsets(batch, tokens, fixed.device)
        indices = fixed + offset[:, None]
        for step, index in enumerate(indices.unbind(dim=1)):
            row = _conditioned_rows(similarity, factors, step, index)
            pivot = flat.index_select(0, index)[:, None]
            adds = pivot > _DEPENDENT
            if valid is not None:
                adds &= valid[:, step : step + 1]
            row = torch.where(adds, row * pivot.clamp_min(_DEPENDENT).rsqrt(), 0.0)
            columns[step].copy_(row)
            residual -= row * row
        ones = torch.ones_like(fixed) if valid is None else valid.to(fixed.dtype)
        taken = torch.zeros_like(residual, dtype=fixed.dtype)
        taken.scatter_add_(1, fixed, ones)
        residual = residual.masked_fill(taken > 0, -1.0)
        return cls(factors[:, :, :count].transpose(1, 2), residual)


def _round_up(count: int) -> int:
    """The smallest multiple of ``ALIGNED`` that is at least ``count``."""
    return -(-count // ALIGNED) * ALIGNED


def _conditioned_rows(
    similarity: Tensor, factors: Tensor, written: int, index: Tensor
) -> Tensor:
    """Rows ``(B, N)`` of one token per image, minus their projection on the filled factors.

    similarity ``(B, N, N)``; factors ``(B, N, F)``, of which the columns from ``written`` on are
    zero; index ``(B,)`` is the token's row among the rows of all images.
    """
    rows = similarity.flatten(0, 1).index_select(0, index)
    if written == 0:
        return rows
    factors = factors.narrow(2, 0, _round_up(written))
    of_token = factors.flatten(0, 1).index_select(0, index).unbind()
    # One image at a time: in a batched product a sum may be rounded differently.
    for row, image, factor in zip(
        rows.unbind(), factors.unbind(), of_token, strict=True
    ):
        torch.addmv(row, image, factor, alpha=-1, out=row)
    return rows


def _snap_to_one(residual: Tensor) -> Tensor:
    """The residual ``(B, N)`` that the first pick reads: 1 where it is within ``UNIT`` of 1."""
    return torch.where((residual - 1).abs() <= UNIT, 1.0, residual)


def greedy_map_torch(
    similarity: Tensor,
    quality: Tensor,
    count: int,
    anchors: Tensor | None = None,
    eligible: Tensor | None = None,
    conditioned: Conditioned | None = None,
) -> Tensor:
    """Plain torch implementation of ``dpp.greedy_map``, the reference for the Triton kernel.

    ``residual`` holds the residual of each token, or -1 if the token can no longer be picked: its
    gain is then at most 0, and stays so because residuals only decrease. The columns of ``factors``
    belong to the tokens of ``conditioned`` and then to the picks, in their order. The number of
    calls dominates the time of a step, so a view that steps share is created once for them.
    """
    batch, tokens = quality.shape
    forced = 0 if anchors is None else anchors.shape[1]
    fixed = 0 if conditioned is None else conditioned.factors.shape[1]
    offset = row_offsets(batch, tokens, quality.device)
    rows = similarity.reshape(batch * tokens, tokens)
    weight = quality * quality
    # Products read whole multiples of ALIGNED columns, so that they are rounded the same way
    # everywhere; the columns that are not filled yet are zero.
    factors = quality.new_zeros(batch, tokens, _round_up(fixed + count))
    if conditioned is None:
        residual = similarity.diagonal(dim1=1, dim2=2).contiguous()
    else:
        residual = conditioned.residual.clone()
        factors[:, :, :fixed] = conditioned.factors.transpose(1, 2)
    residual_of_all = residual.view(-1)  # of the tokens of all images, by `offset`
    columns = factors.unbind(dim=2)
    aligned_columns = factors.narrow(2, 0, _round_up(fixed))
    factors_by_token = aligned_columns.flatten(0, 1)
    factors_by_image = aligned_columns.unbind()
    picks = []
    gains = []

    for step in range(count):
        if anchors is not None and step < forced:
            pick = anchors[:, step]
            # Any gain above EXHAUSTED, so that fill_by_weight does not replace a forced pick.
            gain = torch.ones_like(quality[:, :1])
        else:
            # Only now: an anchor may be ineligible, and its residual is needed as a pivot.
            if step == forced and eligible is not None:
                residual.masked_fill_(~eligible, -1.0)
            exact = _snap_to_one(residual) if fixed + step == 0 else residual
            pick, gain = argmax_within(weight * exact, relative=True)
        picks.append(pick)
        gains.append(gain)
        if step + 1 == count:
            break
        index = pick if batch == 1 else offset + pick
        update = rows.index_select(0, index)
        filled_columns = fixed + step
        if filled_columns % ALIGNED == 0:
            aligned_columns = factors.narrow(2, 0, filled_columns + ALIGNED)
            factors_by_token = aligned_columns.flatten(0, 1)
            factors_by_image = aligned_columns.unbind()
        if filled_columns:
            pick_factors = factors_by_token.index_select(0, index).unbind()
            for row, image_factors, factor in zip(
                update.unbind(), factors_by_image, pick_factors, strict=True
            ):
                torch.addmv(row, image_factors, factor, alpha=-1, out=row)
        pivot = residual_of_all.index_select(0, index)
        # A forced pick is kept even if its pivot is zero. A free pick with such a pivot has no
        # gain and leaves NaN in all later gains: fill_by_weight replaces it and all after it.
        if step < forced:
            pivot.clamp_min_(DIVISOR)
        update *= pivot.rsqrt_().unsqueeze(1)
        columns[filled_columns].copy_(update)
        residual.addcmul_(update, update, value=-1)
        residual_of_all.index_fill_(0, index, -1.0)
    # The picks with a gain above EXHAUSTED are a prefix: gains never increase, and NaN persists.
    order = torch.stack(picks, dim=1)
    return fill_by_weight(order, torch.cat(gains, dim=1), quality, eligible, EXHAUSTED)


@dataclass(frozen=True, slots=True)
class Cap:
    """A limit on the number of picks in each cell."""

    cells: Tensor
    """``(B, N)`` int64 in 0..N-1: the cell of each token."""
    picks: int
    """Maximum number of picks in a cell."""


def capped_greedy_map(
    similarity: Tensor,
    quality: Tensor,
    count: int,
    cap: Cap,
    *,
    anchors: Tensor,
    eligible: Tensor,
    conditioned: Conditioned | None = None,
) -> Tensor:
    """Greedy MAP as in ``dpp.greedy_map``, with a cap on the picks of each cell.

    similarity ``(B, N, N)``, quality ``(B, N)``; anchors ``(B, A)`` are forced first picks;
    eligible ``(B, N)`` bool. Anchors and the tokens of ``conditioned`` count towards their cells,
    and may exceed the cap. Returns ``(B, count)`` int64, unique, the same alone and in a batch.
    While all eligible tokens are in full cells, the cap is ignored. Once gains are exhausted, the
    remaining picks are by quality.
    """
    batch, forced = anchors.shape
    tokens = quality.shape[1]
    cells = cap.cells
    fixed = 0 if conditioned is None else conditioned.factors.shape[1]
    factors = quality.new_zeros(batch, tokens, _round_up(fixed + count))
    if conditioned is None:
        residual = similarity.diagonal(dim1=1, dim2=2)
        occupied = torch.zeros_like(eligible)
    else:
        residual = conditioned.residual
        occupied = residual <= GIVEN
        factors[:, :, :fixed] = conditioned.factors.transpose(1, 2)
    weight = quality * quality
    lowest = torch.finfo(quality.dtype).min
    by_quality = quality.nan_to_num(nan=0.0).clamp_min(lowest)
    open_ = eligible & ~occupied
    occupancy = torch.zeros_like(cells)
    occupancy.scatter_add_(1, cells, occupied.to(cells.dtype))
    gains_decide = torch.ones(batch, dtype=torch.bool, device=quality.device)
    offset = row_offsets(batch, tokens, quality.device)
    picks = []
    for step in range(count):
        if step < forced:
            pick = anchors[:, step]
        else:
            room = open_ & (occupancy.gather(1, cells) < cap.picks)
            room = torch.where(room.any(dim=1, keepdim=True), room, open_)
            exact = _snap_to_one(residual) if fixed + step == 0 else residual
            gains = (weight * exact).masked_fill(~room, -torch.inf)
            best, gain = argmax_within(gains, relative=True)
            gains_decide &= (gain[:, 0] > EXHAUSTED) & (gain[:, 0] < torch.inf)
            heaviest = by_quality.masked_fill(~room, -torch.inf).argmax(dim=1)
            pick = torch.where(gains_decide, best, heaviest)
        picks.append(pick)
        open_.scatter_(1, pick[:, None], False)
        cell = cells.gather(1, pick[:, None])
        occupancy.scatter_add_(1, cell, torch.ones_like(cell))
        row = _conditioned_rows(similarity, factors, fixed + step, offset + pick)
        row = row * residual.gather(1, pick[:, None]).clamp_min(DIVISOR).rsqrt()
        factors[:, :, fixed + step] = row
        residual = residual - row * row
    if not picks:
        return torch.empty(batch, 0, dtype=torch.int64, device=quality.device)
    return torch.stack(picks, dim=1)
