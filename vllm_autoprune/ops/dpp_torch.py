"""Greedy MAP in torch alone: runs anywhere, and is what the Triton form is checked against.

Knows nothing about when it is used; :func:`vllm_autoprune.ops.dpp.greedy_map` decides that.

The kernel L = diag(q) S diag(q) is never formed. Its Cholesky factor is diag(q) times that of S,
so the loop factorises S alone and weighs only the gains: the gain of token j is q_j^2 d_j, where
d_j is what is left of S_jj.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from vllm_autoprune.ops.products import ALIGNED

EXHAUSTED = 1e-10
"""Gain at or below which the kernel has no rank left to tell tokens apart."""

DIVISOR = 1e-12
"""Least residual that is divided by: an anchor may have none left."""

HUGE = 2.0**100
"""What a quality that is infinite or not a number counts for, once only quality is left."""


def greedy_map_torch(
    similarity: Tensor,
    quality: Tensor,
    count: int,
    anchors: Tensor | None = None,
    eligible: Tensor | None = None,
) -> Tensor:
    """As :func:`vllm_autoprune.ops.dpp.greedy_map`.

    A step costs what its calls cost, so there are few of them and views are made once.
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
    written, held = factors.flatten(0, 1), factors.unbind()
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
        if step % ALIGNED == 0:  # columns not yet written are zero and add nothing
            known = factors.narrow(2, 0, step + ALIGNED)
            written, held = known.flatten(0, 1), known.unbind()
        if step:
            seen = written.index_select(0, at).unbind()
            for before, own, new in zip(held, seen, update.unbind(), strict=True):
                torch.addmv(new, before, own, alpha=-1, out=new)
        left = flat.index_select(0, at)
        if step < forced:
            left.clamp_min_(DIVISOR)
        update *= left.rsqrt_().unsqueeze(1)
        columns[step].copy_(update)
        residual.addcmul_(update, update, value=-1)
        flat.index_fill_(0, at, -1.0)  # below zero for good: what is taken has nothing to gain
    return _rest_by_quality(torch.stack(picks, 1), torch.stack(gains, 1), quality, eligible)


def _rest_by_quality(
    picks: Tensor, gains: Tensor, quality: Tensor, eligible: Tensor | None
) -> Tensor:
    """Picks up to the first gain that says nothing, then by quality; all ``(B, count)``.

    Gains never grow, because residuals only shrink, and NaN never goes away: the picks that count
    come first. One stable sort puts the tokens in order, those picks by their turn and above all.
    """
    count, tokens = picks.shape[1], quality.shape[1]
    key = quality.nan_to_num(nan=HUGE, posinf=HUGE, neginf=-HUGE)
    if eligible is not None:
        key.masked_fill_(~eligible, -torch.inf)
    turn = 2 * HUGE * torch.arange(count, 0, -1, dtype=key.dtype, device=key.device)
    # One column more than there are tokens takes the turns of the picks that do not count.
    key = functional.pad(key, (0, 1))
    key.scatter_(1, picks.where(gains > EXHAUSTED, tokens), turn.expand_as(picks))
    return key[:, :tokens].argsort(dim=1, descending=True, stable=True)[:, :count]
