"""Greedy selection, batched and without host syncs: farthest points, coverage, and DPPs.

Greedy MAP of a determinantal point process is that of Chen et al. 2018 (by incremental Cholesky
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
"""Value of an infinite or NaN weight, when tokens are ordered by weight alone."""


def _fill_by_weight(
    picks: Tensor, gains: Tensor, weight: Tensor, eligible: Tensor | None, floor: float
) -> Tensor:
    """Replace the picks whose gain is at most ``floor`` or NaN by tokens of descending weight.

    picks and gains ``(B, count)``, weight ``(B, N)``, eligible ``(B, N)`` bool. Picks that are kept
    come first, in their order; equal weights go to the lower index. ``count`` must not exceed the
    number of eligible tokens.
    """
    count = picks.shape[1]
    tokens = weight.shape[1]
    key = weight.float().nan_to_num(nan=HUGE, posinf=HUGE, neginf=-HUGE)
    if eligible is not None:
        key = key.masked_fill(~eligible, -torch.inf)
    priority = 2 * HUGE * torch.arange(count, 0, -1, dtype=key.dtype, device=key.device)
    # An extra column takes the priorities of invalid picks and is cut off.
    key = functional.pad(key, (0, 1))
    key.scatter_(1, picks.where(gains > floor, tokens), priority.expand_as(picks))
    return key[:, :tokens].argsort(dim=1, descending=True, stable=True)[:, :count]


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens that are chosen before the first pick of :func:`farthest_points`."""

    nearest: Tensor
    """``(B, N)``: distance of each token to the chosen ones; infinite where none is chosen."""
    taken: Tensor
    """``(B, N)`` bool: tokens that are not picked, the chosen ones among them."""


def farthest_points(distance: Tensor, count: int, chosen: Chosen) -> Tensor:
    """Pick ``count`` tokens, each the farthest from all tokens chosen before, in pick order.

    distance ``(B, N, N)``. Returns ``(B, count)`` int64. Picked tokens are masked, so an index
    never repeats, even with duplicates or NaN; ties go to the lower index (:func:`argmax_within`).
    ``count`` must not exceed the number of tokens not taken.
    """
    batch, tokens = chosen.nearest.shape
    offset = row_offsets(batch, tokens, distance.device)
    rows = distance.reshape(batch * tokens, tokens)
    finite = chosen.nearest.nan_to_num(nan=torch.inf, posinf=torch.inf)
    nearest = finite.masked_fill(chosen.taken, -torch.inf)
    # A token at minus infinity stays there: fmin returns the smaller number and ignores NaN.
    flat = nearest.view(-1)
    picks = []
    for _ in range(count):
        pick, _ = argmax_within(nearest)
        picks.append(pick)
        index = pick if batch == 1 else offset + pick
        flat.index_fill_(0, index, -torch.inf)
        torch.fmin(nearest, rows.index_select(0, index), out=nearest)
    if not picks:
        return torch.empty(batch, 0, dtype=torch.int64, device=nearest.device)
    return torch.stack(picks, dim=1)


def weighted_farthest_points(
    distance: Tensor,
    weight: Tensor,
    count: int,
    chosen: Chosen,
    *,
    floor: float,
    leading: Tensor | None = None,
    fill: Tensor | None = None,
) -> Tensor:
    """Pick ``count`` tokens by weight times distance to the tokens chosen before, in pick order.

    distance ``(B, N, N)``; weight ``(B, N)``, at least 0. Where nothing is chosen yet the first
    pick is the token farthest from its nearest neighbour, whatever its weight. leading ``(B,
    count)`` are forced picks, -1 where a pick is free: they come first in their rows. From the
    first score of at most ``floor`` on, tokens come by descending fill ``(B, N)``, by default the
    weight.
    """
    nearest = chosen.nearest
    taken = chosen.taken
    batch, tokens = nearest.shape
    offset = row_offsets(batch, tokens, distance.device)
    rows = distance.reshape(batch * tokens, tokens)
    free = ~taken
    begins = nearest.isinf().all(dim=1)
    picks = []
    gains = []
    for step in range(count):
        score = weight * nearest
        if step == 0:
            itself = torch.eye(tokens, dtype=torch.bool, device=distance.device)
            apart = distance.masked_fill(itself, torch.inf).amin(dim=1)
            score = torch.where(begins[:, None], apart, score)
        pick, gain = argmax_within(score.masked_fill(taken, -torch.inf))
        if step == 0:
            gain = gain.masked_fill(begins[:, None], torch.inf)
        if leading is not None:
            forced = leading[:, step] >= 0
            pick = torch.where(forced, leading[:, step], pick)
            gain = gain.masked_fill(forced[:, None], torch.inf)
        picks.append(pick)
        gains.append(gain)
        taken = taken.scatter(1, pick[:, None], True)
        # fmin ignores NaN, which minimum would spread to all tokens.
        nearest = torch.fmin(nearest, rows.index_select(0, offset + pick))
    if not picks:
        return torch.empty(batch, 0, dtype=torch.int64, device=nearest.device)
    fill = weight if fill is None else fill
    order = torch.stack(picks, dim=1)
    return _fill_by_weight(order, torch.cat(gains, dim=1), fill, free, floor)


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
    """Pick ``count`` candidates, each adding most to what is covered, in pick order.

    degrees ``(B, N, R)``: how well each candidate covers each row; covered ``(B, R)``: how well
    earlier picks do; taken ``(B, N)`` bool excludes candidates. With ``scale``, gains are
    multiplied by weight ``(B, N)``. From the first gain of at most ``floor`` on, candidates come by
    descending weight. Returns ``(B, count)`` int64, unique; ties go to the lower index
    (:func:`argmax_within`). ``count`` must not exceed the number of candidates not taken.
    """
    batch = degrees.shape[0]
    if count == 0:
        return torch.empty(batch, 0, dtype=torch.int64, device=degrees.device)
    picks = []
    gains = []
    # One image at a time, whose picks and gains (count,) follow each other.
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
    return _fill_by_weight(order, gained, weight, ~taken, floor)


EXHAUSTED = 1e-10
"""Gain at or below which the rank of the kernel counts as exhausted."""

DIVISOR = 1e-12
"""Lower bound of a divisor: the residual of an anchor may be zero."""

_DEPENDENT = 1e-5
"""Residual at or below which a given token is a combination of those before it: what is left of its
row is rounding."""

UNIT = 2**-6
"""Difference from 1 within which a diagonal entry counts as a rounded 1: it is up to 9e-3 where
rows are divided by their norm in bfloat16."""

GIVEN = -0.5
"""Residual at or below which a token is one of those that were conditioned on; others are only
negative by rounding."""


@dataclass(frozen=True, slots=True)
class Conditioned:
    """Similarity S of B images, conditioned on A given tokens each: S less its projection on them.

    Quality only scales rows and columns of L = diag(q) S diag(q), so this holds for every question
    about an image. factors ``(B, A, N)`` are rows of the Cholesky factor; residual ``(B, N)`` is
    the conditioned diagonal, -1 for the given tokens.
    """

    factors: Tensor
    residual: Tensor

    @classmethod
    def on(
        cls, similarity: Tensor, fixed: Tensor, valid: Tensor | None = None
    ) -> Conditioned:
        """Condition similarity ``(B, N, N)`` float32 on the tokens at fixed ``(B, A)``, each once.

        valid ``(B, A)`` bool leaves some of them out, where images have different numbers of them.
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
    """Rows ``(B, N)`` of one token of each image, less their projection on the written factors.

    similarity ``(B, N, N)``; factors ``(B, N, F)``, zero from ``written`` on; index ``(B,)`` counts
    the tokens of all images.
    """
    rows = similarity.flatten(0, 1).index_select(0, index)
    if written == 0:
        return rows
    factors = factors.narrow(2, 0, _round_up(written))
    of_token = factors.flatten(0, 1).index_select(0, index).unbind()
    # One image at a time: a sum over a batch may be rounded in another way.
    for row, image, factor in zip(
        rows.unbind(), factors.unbind(), of_token, strict=True
    ):
        torch.addmv(row, image, factor, alpha=-1, out=row)
    return rows


def _snap_to_one(residual: Tensor) -> Tensor:
    """Residual ``(B, N)`` that the first pick reads: 1 where S_jj is a rounded 1."""
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

    The time of a step is dominated by the number of calls, so views are created outside the loop.
    """
    batch, tokens = quality.shape
    forced = 0 if anchors is None else anchors.shape[1]
    fixed = 0 if conditioned is None else conditioned.factors.shape[1]
    offset = row_offsets(batch, tokens, quality.device)
    rows = similarity.reshape(batch * tokens, tokens)
    weight = quality * quality
    factors = quality.new_zeros(batch, tokens, _round_up(fixed + count))
    if conditioned is None:
        residual = similarity.diagonal(dim1=1, dim2=2).contiguous()
    else:
        residual = conditioned.residual.clone()
        factors[:, :, :fixed] = conditioned.factors.transpose(1, 2)
    flat = residual.view(-1)
    columns = factors.unbind(dim=2)
    written = factors.narrow(2, 0, _round_up(fixed))
    by_token = written.flatten(0, 1)
    by_image = written.unbind()
    picks = []
    gains = []

    for step in range(count):
        if anchors is not None and step < forced:
            pick = anchors[:, step]
            gain = torch.ones_like(quality[:, :1])
        else:
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
        column = fixed + step
        if column % ALIGNED == 0:  # columns not yet written are zero
            written = factors.narrow(2, 0, column + ALIGNED)
            by_token = written.flatten(0, 1)
            by_image = written.unbind()
        if column:
            of_pick = by_token.index_select(0, index).unbind()
            for row, image, factor in zip(
                update.unbind(), by_image, of_pick, strict=True
            ):
                torch.addmv(row, image, factor, alpha=-1, out=row)
        pivot = flat.index_select(0, index)
        if step < forced:
            pivot.clamp_min_(DIVISOR)
        update *= pivot.rsqrt_().unsqueeze(1)
        columns[column].copy_(update)
        residual.addcmul_(update, update, value=-1)
        # Stays negative, so the token is not picked again.
        flat.index_fill_(0, index, -1.0)
    # Gains never increase and NaN persists, so the picks that count come first.
    order = torch.stack(picks, dim=1)
    return _fill_by_weight(order, torch.cat(gains, dim=1), quality, eligible, EXHAUSTED)


@dataclass(frozen=True, slots=True)
class Cap:
    """A limit on the picks of each cell."""

    cells: Tensor
    """``(B, N)`` int64 in 0..N-1: the cell of each token."""
    picks: int
    """Picks of a cell at most."""


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

    similarity ``(B, N, N)``, quality ``(B, N)``; anchors ``(B, A)`` are forced first picks, which
    count towards their cells and may exceed the cap, as do the tokens of ``conditioned``; eligible
    ``(B, N)`` bool. Returns ``(B, count)`` int64, unique, the same alone and in a batch. If all
    eligible tokens are in full cells the cap is ignored; once gains are exhausted, the remaining
    picks are by quality.
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
    spare = quality.nan_to_num(nan=0.0).clamp_min(lowest)
    open_ = eligible & ~occupied
    occupancy = torch.zeros_like(cells)
    occupancy.scatter_add_(1, cells, occupied.to(cells.dtype))
    sound = torch.ones(batch, dtype=torch.bool, device=quality.device)
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
            sound = sound & (gain[:, 0] > EXHAUSTED) & (gain[:, 0] < torch.inf)
            spared = spare.masked_fill(~room, -torch.inf).argmax(dim=1)
            pick = torch.where(sound, best, spared)
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
