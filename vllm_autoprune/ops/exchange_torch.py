"""Exchanges of kept tokens for better ones, one after another: definition, and a torch loop."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_autoprune.ops.rowwise import argmax_within, row_offsets


@dataclass(frozen=True, slots=True)
class Exchange:
    """One call for B images of N tokens, of which up to q are exchanged.

    Exchange i removes token i of ``leaving`` for the candidate of highest score, which must exceed
    the score of the leaving token; else it and all later exchanges are not made. A token scores
    ``relevance x quality - diversity x similarity``, where similarity is its largest cosine to a
    token that is kept by then (at least -1). Candidates are the tokens of ``pool`` that have not
    entered, whose similarity is at most ``most_similar`` and whose quality at least ``least``. Ties
    go to the lower index (:func:`~vllm_autoprune.ops.rowwise.argmax_within`), NaN is no candidate.
    """

    cosine: Tensor
    """``(B, N, N)`` float32."""
    nearest: Tensor
    """``(B, N)``: largest cosine to a kept token that is not in ``leaving``; minus infinity if
    there is none."""
    quality: Tensor
    """``(B, N)`` float32."""
    pool: Tensor
    """``(B, N)`` bool; no kept token is in it."""
    leaving: Tensor
    """``(B, q)`` int64, unique in each row."""
    least: Tensor
    """``(B, q)``: quality that the token which enters in the place of each has to have."""
    most_similar: float = torch.inf
    relevance: float = 1.0
    diversity: float = 0.0


def exchange_torch(call: Exchange) -> Tensor:
    """Token ``(B, q)`` int64 that enters at each exchange, -1 from the first one not made on.

    The reference for the Triton kernel.
    """
    rows = _Rows.of(call.cosine)
    entering = torch.full_like(call.leaving, -1)
    value = call.relevance * call.quality
    pool = call.pool
    to_entered = torch.full_like(call.nearest, -torch.inf)
    active = torch.ones_like(pool[:, :1])
    for step, to_waiting in enumerate(_similarity_to_waiting(call, rows)):
        similarity = to_waiting.maximum(to_entered)
        score = value - call.diversity * similarity.clamp_min(-1)
        threshold = score.gather(1, call.leaving[:, step : step + 1])
        admitted = pool & (similarity <= call.most_similar) & ~score.isnan()
        admitted &= call.quality >= call.least[:, step : step + 1]
        score = score.masked_fill(~admitted, -torch.inf)
        pick = argmax_within(score, relative=True)[0][:, None]
        active = active & (score.gather(1, pick) > threshold)
        if active.is_cpu and not active.any():  # a GPU would be waited for
            break
        entering[:, step : step + 1] = torch.where(active, pick, -1)
        pool = pool.scatter(1, pick, pool.gather(1, pick) & ~active)
        nearer = to_entered.maximum(rows.at(pick[:, 0]))
        to_entered = torch.where(active, nearer, to_entered)
    return entering


def _similarity_to_waiting(call: Exchange, rows: _Rows) -> list[Tensor]:
    """Largest cosine ``(B, N)`` to a token that stays or leaves later, at each exchange."""
    largest = call.nearest
    backwards = []
    for token in reversed(call.leaving.unbind(dim=1)):
        backwards.append(largest)
        largest = largest.maximum(rows.at(token))
    return backwards[::-1]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of all images' cosines, and the first of each image."""

    rows: Tensor
    first: Tensor

    @classmethod
    def of(cls, cosine: Tensor) -> _Rows:
        batch, tokens, _ = cosine.shape
        rows = cosine.reshape(batch * tokens, tokens)
        return cls(rows, row_offsets(batch, tokens, cosine.device))

    def at(self, token: Tensor) -> Tensor:
        """The row ``(B, N)`` of a token ``(B,)`` of each image."""
        return self.rows.index_select(0, token + self.first)
