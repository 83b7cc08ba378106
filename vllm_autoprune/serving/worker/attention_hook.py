"""Forward hook that measures the attention each token receives, for towers without [CLS].

vLLM hands queries and keys, already rotated, to one attention module in every tower. Fused
kernels never form probabilities, so they are recomputed here, a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vllm_autoprune.serving.worker.tensor_parallel import sum_over_ranks, world_size

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import MMEncoderAttention

_MAX_QUERIES = 512
"""Queries whose probabilities are in memory at a time."""


class AttentionHook:
    """Forward hook on the ``MMEncoderAttention`` of one layer.

    In place while :meth:`recording` only: queries and keys of a video would stay in memory.
    """

    def __init__(self, attention: MMEncoderAttention) -> None:
        self._attention = attention
        self._heads: int = attention.num_heads
        self._scale: float = attention.scale
        self._projections: tuple[Tensor, Tensor] | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Read the calls within, of which the last one counts."""
        handle = self._attention.register_forward_pre_hook(self._store, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _store(
        self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> None:
        query, key = (kwargs["query"], kwargs["key"]) if not args else args[:2]
        self._projections = query, key

    def take(self, counts: Sequence[int] | None = None) -> list[Tensor]:
        """``(n,)`` float32 for every sequence of the batch that just went through the tower.

        ``counts`` are the lengths of sequences that lie one behind another in a batch of one.
        """
        assert self._projections is not None, "the vision tower has not run"
        (query, key), self._projections = self._projections, None
        query, key = (
            part if part.dim() == 4 else part.unflatten(-1, (self._heads, -1))
            for part in (query, key)
        )
        if counts is not None:
            queries, keys = query[0].split(list(counts)), key[0].split(list(counts))
        else:
            queries, keys = query.unbind(), key.unbind()
        return [self._received(q, k) for q, k in zip(queries, keys, strict=True)]

    def _received(self, query: Tensor, key: Tensor) -> Tensor:
        """Mean over heads and queries ``(n,)`` of one sequence, from ``(n, h, d)`` each."""
        keys = key.float().transpose(0, 1)
        total = torch.zeros(key.shape[0], device=key.device)
        for some in query.float().transpose(0, 1).split(_MAX_QUERIES, dim=1):
            scores = some @ keys.transpose(1, 2) * self._scale
            total += scores.softmax(dim=-1).sum(dim=(0, 1))
        shared = world_size()
        total = sum_over_ranks(total) if shared > 1 else total
        return total / (self._heads * shared * query.shape[0])
