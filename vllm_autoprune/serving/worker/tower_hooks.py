"""What policies read inside a vision tower: attention, keys, merger input, the next layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.serving.worker.tensor_parallel import sum_over_ranks, world_size

if TYPE_CHECKING:
    from transformers import CLIPVisionConfig
    from vllm.model_executor.layers.attention import MMEncoderAttention
    from vllm.model_executor.models.clip import CLIPAttention

# Forward hook that measures the attention each token receives, for towers without [CLS].
#
# vLLM hands queries and keys, already rotated, to one attention module in every tower. Fused
# kernels never form probabilities, so they are recomputed here, a few rows at a time.


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


# Forward hooks that read what enters a patch merger, as one row and two norms a token.
#
# A merger makes one token of the patches of a cell. Its input, several times as many numbers as its
# output, is reduced within the hook and not kept.


class MergerHook:
    """Forward hooks on a patch merger, in place while :meth:`recording` only.

    ``merger`` is called with patches ``(P, ..., C)``, ``patches`` of each token one behind another,
    or with tokens ``(..., patches * C)`` where they are ``joined`` before. ``scored`` is the module
    before which norms are taken, called with patches of the same order.
    """

    def __init__(
        self, merger: nn.Module, patches: int, scored: nn.Module, *, joined: bool = False
    ) -> None:
        self._merger = merger
        self._scored = scored
        self._patches = patches
        self._joined = joined
        self._rows: Tensor | None = None
        self._norms: Tensor | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Read the calls within, of which the last one counts; other calls cost nothing."""
        handles = (
            self._merger.register_forward_pre_hook(self._store_rows),
            self._scored.register_forward_pre_hook(self._store_norms),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self) -> tuple[Tensor, Tensor]:
        """Return, and drop, what entered the merger, float32.

        Rows ``(N, C)``, the mean of each token's patches, and norms ``(N, 2)``: sum of absolute
        values and Euclidean, the mean over its patches; of its one row where they are joined.
        """
        assert self._rows is not None and self._norms is not None, "the merger has not run"
        rows, norms = self._rows, self._norms
        self._rows = self._norms = None
        return rows, norms

    def _store_rows(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._rows = self._cells(inputs[0]).mean(dim=1, dtype=torch.float32)

    def _store_norms(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        cells = self._cells(inputs[0])
        parts = cells.flatten(1)[:, None] if self._joined else cells
        orders = (1, 2)
        norms = [
            torch.linalg.vector_norm(parts, order, dim=2, dtype=torch.float32) for order in orders
        ]
        self._norms = torch.stack(norms, dim=2).mean(dim=1)

    def _cells(self, inputs: Tensor) -> Tensor:
        """``(N, patches, C)``."""
        width = inputs.shape[-1] // (self._patches if self._joined else 1)
        return inputs.reshape(-1, self._patches, width)


# Forward hook that reads queries and keys of the vision tower's last layer.
#
# Fused attention kernels never form probabilities, so the [CLS] row is recomputed from them. vLLM
# builds the tower only up to the feature layer, so its last layer is the one whose output the model
# reads (``attentions[-2]`` of the full tower for LLaVA-1.5).


@dataclass(frozen=True, slots=True)
class _QueriesAndKeys:
    """Queries and keys ``(B, 1 + N, h, d)`` of the h heads of this rank; [CLS] comes first.

    heads counts those of all ranks; sharded says whether there are other ranks' heads.
    """

    query: Tensor
    key: Tensor
    scale: float
    heads: int
    sharded: bool

    def cls_attention(self) -> Tensor:
        """``(B, N)`` float32: the [CLS] row, averaged over heads; [CLS] itself is left out."""
        scores = torch.einsum("bhd,bnhd->bhn", self.query[:, 0].float(), self.key.float())
        total = (scores * self.scale).softmax(dim=-1).sum(dim=1)
        return self._mean(total)[:, 1:]

    def mean_keys(self) -> Tensor:
        """``(B, N, d)`` float32: the patches' keys, averaged over heads."""
        return self._mean(self.key[:, 1:].float().sum(dim=2))

    def _mean(self, total: Tensor) -> Tensor:
        return (sum_over_ranks(total) if self.sharded else total) / self.heads


class QkvHook:
    """Forward hook on ``self_attn.qkv_proj`` of the last layer."""

    def __init__(self, attention: CLIPAttention) -> None:
        self._attention = attention
        self._qkv: Tensor | None = None
        attention.qkv_proj.register_forward_hook(self._store)

    def _store(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        assert isinstance(output, tuple)
        self._qkv = output[0]

    def take(self) -> _QueriesAndKeys:
        """Return, and drop, queries and keys of the batch that just went through the tower."""
        assert self._qkv is not None, "the vision tower has not run"
        qkv, self._qkv = self._qkv, None
        attention = self._attention
        heads = attention.num_heads_per_partition
        query, key, _ = qkv.unflatten(-1, (3, heads, -1)).unbind(dim=2)
        sharded = attention.tp_size > 1
        return _QueriesAndKeys(query, key, attention.scale, attention.num_heads, sharded)


# Attention and keys of the vision-tower layer after the one that the model reads.
#
# vLLM builds the tower only up to the feature layer, so this layer's norm and its two projections
# are copied from the checkpoint while it is loaded.


PARTS = ("layer_norm1", "self_attn.q_proj", "self_attn.k_proj")
NAMES = tuple(f"{part}.{kind}" for part in PARTS for kind in ("weight", "bias"))


class NextTowerLayer:
    """``layer_norm1``, ``q_proj`` and ``k_proj`` of one CLIP layer, whole on every rank.

    Not a module: vLLM's loader must not look for its weights.
    """

    def __init__(self, config: CLIPVisionConfig, layer: int) -> None:
        self.layer = layer
        self._width = int(config.hidden_size)
        self._eps = float(config.layer_norm_eps)
        self._weights: dict[str, Tensor] = {}
        names = "|".join(map(re.escape, NAMES))
        # Checkpoints differ in the prefix before `vision_tower` and in the wrapping of the tower.
        self._own = re.compile(
            rf"(?:^|\.)vision_tower\.(?:vision_model\.)?encoder\.layers\.{layer}\.({names})$"
        )

    def capture_weights(
        self, weights: Iterable[tuple[str, Tensor]], like: Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """Pass the weights through; copy this layer's to the device and dtype of ``like``.

        Or of those it has: while vLLM loads a model anew, its parameters are on the meta device.
        """
        like = next(iter(self._weights.values()), like)
        for name, weight in weights:
            match = self._own.search(name)
            if match is not None:
                self._weights[match[1]] = weight.detach().to(like.device, like.dtype, copy=True)
            yield name, weight

    def require_weights(self) -> None:
        """Raises :class:`ConfigError` with every part that the checkpoint does not have."""
        problems = []
        for name in NAMES:
            where = f"vision_tower...encoder.layers.{self.layer}.{name}"
            weight, shape = self._weights.get(name), self._shape(name)
            if weight is None:
                what = "is not in the checkpoint, and the state's base policy reads it"
            elif weight.shape != shape:
                what = f"has shape {tuple(weight.shape)}, not {shape}"
            else:
                continue
            fix = "serve a checkpoint with the whole vision tower, or another base policy"
            problems.append(Problem(where, what, fix))
        if problems:
            raise ConfigError("next layer of the vision tower", problems)

    def init_dummy_weights(self, like: Tensor) -> None:
        """Draw random weights where none were loaded at all (``--load-format dummy``)."""
        if self._weights:
            return
        source = torch.Generator().manual_seed(self.layer)
        for name in NAMES:
            weight = torch.empty(self._shape(name)).uniform_(-1e-3, 1e-3, generator=source)
            self._weights[name] = weight.to(like.device, like.dtype)

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Attention ``(B, N)`` float32 and keys ``(B, N, Dv)`` of states ``(B, 1 + N, Dv)``.

        A single head as wide as the tower, over [CLS] and patches; the [CLS] row, patches only.
        """
        norm, query, key = (
            (self._weights[f"{part}.weight"], self._weights[f"{part}.bias"]) for part in PARTS
        )
        normed = functional.layer_norm(hidden, (self._width,), *norm, self._eps)
        queries = functional.linear(normed[:, 0], *query)
        keys = functional.linear(normed, *key)
        scores = torch.einsum("bd,bnd->bn", queries.float(), keys.float())
        row = (scores * self._width**-0.5).softmax(dim=-1)
        return row[:, 1:], keys[:, 1:]

    def _shape(self, name: str) -> tuple[int, ...]:
        square = name.endswith("proj.weight")
        return (self._width, self._width) if square else (self._width,)
