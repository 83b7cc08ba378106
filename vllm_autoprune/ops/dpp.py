"""Greedy MAP inference for a determinantal point process, batched and without host syncs.

Knows nothing about where similarity and quality come from.

Source: Chen et al. 2018 (fast greedy MAP, incremental Cholesky), as CDPruner uses it; the rules
for exhausted rank are ours, because the published loop then returns fewer than K tokens.

The kernel L = diag(q) S diag(q) is never formed. Its Cholesky factor is diag(q) times that of S,
so the loop factorises S alone and weighs only the gains: the gain of token j is q_j^2 d_j, where
d_j is what is left of S_jj.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_autoprune.ops.products import ALIGNED

EXHAUSTED = 1e-10
"""Gain at or below which the kernel has no rank left to tell tokens apart."""

DIVISOR = 1e-12
"""Least residual that is divided by: an anchor may have none left."""


Form = Callable[[Tensor, Tensor, int, Tensor | None, Tensor | None], Tensor]
"""(similarity, quality, count, anchors, eligible) -> picks."""


def greedy_map(
    similarity: Tensor,
    quality: Tensor,
    count: int,
    *,
    anchors: Tensor | None = None,
    eligible: Tensor | None = None,
) -> Tensor:
    """The ``count`` picks of greedy MAP on L = diag(q) S diag(q), in pick order.

    similarity ``(B, N, N)``, quality ``(B, N)``, both float32; anchors ``(B, A)`` are forced
    first picks on which the rest is conditioned; eligible ``(B, N)`` bool limits the rest.
    Returns ``(B, count)`` int64, unique in each row. Ties go to the lower index. From the first
    step on where no eligible token has a finite gain above :data:`EXHAUSTED` (rank below
    ``count``, or NaN in the input) the rest is by descending quality, NaN first.
    ``count`` must not exceed the number of eligible tokens.

    An image's picks are the same bits alone and in a batch. On a CUDA device one Triton kernel
    does all of it, where Triton works.
    """
    form = _fastest_form(similarity.device)
    return form(similarity, quality, count, anchors, eligible)


def greedy_map_torch(
    similarity: Tensor,
    quality: Tensor,
    count: int,
    anchors: Tensor | None = None,
    eligible: Tensor | None = None,
) -> Tensor:
    """As :func:`greedy_map`, in torch alone: what the Triton form is checked against.

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
    done, held = factors, list(factors.unbind())
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
        at = first + pick
        update = rows.index_select(0, at)
        if step % ALIGNED == 0:  # columns not yet written are zero and add nothing
            done = factors.narrow(2, 0, step + ALIGNED)
            held = list(done.unbind())
        if step:
            seen = done.flatten(0, 1).index_select(0, at).unbind()
            for before, own, new in zip(held, seen, update.unbind(), strict=True):
                torch.addmv(new, before, own, alpha=-1, out=new)
        left = flat.index_select(0, at)
        if step < forced:
            left.clamp_min_(DIVISOR)
        update *= left.rsqrt_()[:, None]
        columns[step].copy_(update)
        residual.addcmul_(update, update, value=-1)
        flat.index_fill_(0, at, -1.0)  # below zero for good: what is taken has nothing to gain
    return _rest_by_quality(torch.stack(picks, 1), torch.stack(gains, 1), quality, eligible)


def _rest_by_quality(
    picks: Tensor, gains: Tensor, quality: Tensor, eligible: Tensor | None
) -> Tensor:
    """Picks up to the first gain that says nothing, then by quality; all ``(B, count)``."""
    batch, count = picks.shape
    tokens = quality.shape[1]
    sound = (gains > EXHAUSTED) & (gains < torch.inf)
    if not sound.is_cuda and sound.all():  # only the CPU can look without waiting
        return picks
    sound = sound.cumprod(dim=1).bool()
    # One column more than there are tokens takes the marks of the picks that do not count.
    marks = torch.zeros(batch, tokens + 1, dtype=torch.bool, device=picks.device)
    taken = marks.scatter_(1, picks.where(sound, tokens), True)[:, :tokens]
    if eligible is not None:
        taken = taken | ~eligible
    finite = torch.finfo(quality.dtype).min
    key = quality.nan_to_num(nan=torch.inf, posinf=torch.inf).clamp_min(finite)
    order = key.masked_fill(taken, -torch.inf).argsort(dim=1, descending=True, stable=True)
    place = torch.arange(count, device=picks.device) - sound.sum(dim=1, keepdim=True)
    return picks.where(sound, order.gather(1, place.clamp_min(0)))


def _fastest_form(device: torch.device) -> Form:
    if device.type != "cuda":
        return greedy_map_torch
    try:
        from vllm_autoprune.ops.dpp_triton import greedy_map_triton, works
    except ImportError:
        return greedy_map_torch
    return greedy_map_triton if works() else greedy_map_torch
