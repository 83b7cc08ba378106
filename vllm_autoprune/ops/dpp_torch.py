"""Greedy MAP in plain torch, the reference implementation for the Triton kernel.

The kernel L = diag(q) S diag(q) is never formed. Its Cholesky factor is diag(q) times that of S, so
only S is factorised, and the gain of token j is q_j^2 d_j with d_j the residual of S_jj.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from vllm_autoprune.ops.products import ALIGNED

EXHAUSTED = 1e-10
"""Gain at or below which the rank of the kernel counts as exhausted."""

DIVISOR = 1e-12
"""Lower bound of a divisor: the residual of an anchor may be zero."""

HUGE = 2.0**100
"""Value of an infinite or NaN quality, when picks are by quality alone."""


def greedy_map_torch(
    similarity: Tensor,
    quality: Tensor,
    count: int,
    anchors: Tensor | None = None,
    eligible: Tensor | None = None,
) -> Tensor:
    """Plain torch implementation of :func:`vllm_autoprune.ops.dpp.greedy_map`.

    The time of a step is dominated by the number of calls, so views are created outside the loop.
    """
    batch, tokens = quality.shape
    forced = 0 if anchors is None else anchors.shape[1]
    first = torch.arange(0, batch * tokens, tokens, device=quality.device)
    rows = similarity.reshape(batch * tokens, tokens)
    weight = quality * quality
    residual = similarity.diagonal(dim1=1, dim2=2).contiguous()
    flat = residual.view(-1)
    factors = quality.new_zeros(batch, tokens, -(-count // ALIGNED) * ALIGNED)
    columns = factors.unbind(dim=2)
    flat_factors, image_factors = factors.flatten(0, 1), factors.unbind()
    picks, gains = [], []

    for step in range(count):
        if anchors is not None and step < forced:
            pick, gain = anchors[:, step], torch.ones_like(quality[:, 0])
        else:
            if step == forced and eligible is not None:
                residual.masked_fill_(~eligible, -1.0)
            gain, pick = (weight * residual).max(dim=1)
        picks.append(pick)
        gains.append(gain)
        if step + 1 == count:
            break
        at = pick if batch == 1 else first + pick
        update = rows.index_select(0, at)
        if step % ALIGNED == 0:  # columns not yet written are zero
            known = factors.narrow(2, 0, step + ALIGNED)
            flat_factors, image_factors = known.flatten(0, 1), known.unbind()
        if step:
            own_factors = flat_factors.index_select(0, at).unbind()
            for image, own, new in zip(image_factors, own_factors, update.unbind(), strict=True):
                torch.addmv(new, image, own, alpha=-1, out=new)
        pivot = flat.index_select(0, at)
        if step < forced:
            pivot.clamp_min_(DIVISOR)
        update *= pivot.rsqrt_().unsqueeze(1)
        columns[step].copy_(update)
        residual.addcmul_(update, update, value=-1)
        flat.index_fill_(0, at, -1.0)  # stays negative, so the token is not picked again
    return _rest_by_quality(torch.stack(picks, 1), torch.stack(gains, 1), quality, eligible)


def _rest_by_quality(
    picks: Tensor, gains: Tensor, quality: Tensor, eligible: Tensor | None
) -> Tensor:
    """Replace the picks from the first exhausted gain on by tokens of descending quality.

    All tensors ``(B, count)``. Gains never increase and NaN persists, so the valid picks come
    first; one stable sort orders them by step, before all other tokens by quality.
    """
    count, tokens = picks.shape[1], quality.shape[1]
    key = quality.nan_to_num(nan=HUGE, posinf=HUGE, neginf=-HUGE)
    if eligible is not None:
        key.masked_fill_(~eligible, -torch.inf)
    priority = 2 * HUGE * torch.arange(count, 0, -1, dtype=key.dtype, device=key.device)
    # An extra column takes the priorities of invalid picks and is cut off.
    key = functional.pad(key, (0, 1))
    key.scatter_(1, picks.where(gains > EXHAUSTED, tokens), priority.expand_as(picks))
    return key[:, :tokens].argsort(dim=1, descending=True, stable=True)[:, :count]
