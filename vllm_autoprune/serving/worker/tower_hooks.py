"""What policies read inside a vision tower: attention, keys, merger input, the next layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.serving.compat.worker import world_size

if TYPE_CHECKING:
    from transformers import CLIPVisionConfig
    from vllm.model_executor.layers.attention import MMEncoderAttention

T = TypeVar("T")


class InputHook(Generic[T]):
    """Forward hook that stores the result of ``read`` on a module's inputs, at each of its calls.

    It is installed only during :meth:`recording`: otherwise inputs of videos would stay in memory.
    """

    def __init__(self, module: nn.Module, read: Callable[..., T]) -> None:
        self._module = module
        self._read = read
        self._values: list[T] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Store the calls within; other calls cost nothing."""

        def store(
            module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]
        ) -> None:
            self._values.append(self._read(*inputs, **named))

        self._values = []
        handle = self._module.register_forward_pre_hook(store, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def take(self) -> T:
        """Return the result of the last call, and drop all results."""
        return self.take_each()[-1]

    def take_each(self) -> list[T]:
        """Return the results of all calls, and drop them."""
        assert self._values, "the vision tower has not run"
        values = self._values
        self._values = []
        return values


# Queries and keys of one layer of a tower, after rotation, which vLLM passes to one attention
# module in every tower. Fused kernels never form probabilities, so these are recomputed here.


_MAX_QUERIES = 512
"""Number of queries whose probabilities are in memory at a time."""


@dataclass(frozen=True, slots=True)
class QueriesAndKeys:
    """Queries and keys of the h heads of this rank."""

    query: Tensor
    """``(B, n, h, d)``."""
    key: Tensor
    """``(B, n, h, d)``."""
    scale: float
    """Factor of the products, before the softmax."""

    @classmethod
    def hook(cls, attention: MMEncoderAttention) -> InputHook[QueriesAndKeys]:
        """Hook that reads queries and keys at the inputs of one layer's attention module."""

        def read(
            query: Tensor, key: Tensor, *args: Tensor, **named: Tensor
        ) -> QueriesAndKeys:
            query, key = (
                part
                if part.dim() == 4
                else part.unflatten(-1, (attention.num_heads, -1))
                for part in (query, key)
            )
            if query.shape[2] > key.shape[2]:  # heads of queries share one of keys
                key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
            return cls(query, key, attention.scale)

        return InputHook(attention, read)

    def received(self, counts: Sequence[int] | None = None) -> list[Tensor]:
        """Attention that each token receives, ``(n,)`` float32 for every sequence of the batch.

        It is the mean over queries and heads, for towers without [CLS]. ``counts`` are the lengths
        of sequences that are concatenated in a batch of one.
        """
        if counts is not None:
            queries, keys = (
                part[0].split(list(counts)) for part in (self.query, self.key)
            )
        else:
            queries = self.query.unbind()
            keys = self.key.unbind()
        sequences = []
        for query, key in zip(queries, keys, strict=True):
            transposed = key.float().transpose(0, 1)
            total = torch.zeros(key.shape[0], device=key.device)
            for some in query.float().transpose(0, 1).split(_MAX_QUERIES, dim=1):
                scores = some @ transposed.transpose(1, 2) * self.scale
                total += scores.softmax(dim=-1).sum(dim=(0, 1))
            sequences.append(self._sum(total) / (self._heads * query.shape[0]))
        return sequences

    def cls_attention(self) -> Tensor:
        """``(B, N)`` float32: the attention of [CLS], which comes first, averaged over heads.

        The entry of [CLS] itself is left out.
        """
        scores = torch.einsum(
            "bhd,bnhd->bhn", self.query[:, 0].float(), self.key.float()
        )
        total = (scores * self.scale).softmax(dim=-1).sum(dim=1)
        return (self._sum(total) / self._heads)[:, 1:]

    def mean_keys(self) -> Tensor:
        """``(B, N, d)`` float32: the keys of all tokens but [CLS], averaged over heads."""
        return self._sum(self.key[:, 1:].float().sum(dim=2)) / self._heads

    @property
    def _heads(self) -> int:
        """Number of heads on all ranks."""
        return self.query.shape[2] * world_size()

    def _sum(self, total: Tensor) -> Tensor:
        """The sum over tensor-parallel ranks, bit-identical on each of them."""
        if world_size() == 1:
            return total
        from vllm.distributed import tensor_model_parallel_all_reduce

        summed: Tensor = tensor_model_parallel_all_reduce(total)
        return summed


class Merger(NamedTuple):
    """A patch merger, which makes one token of the patches of a cell."""

    module: nn.Module
    """The merger's module, called with patches ``(P, ..., C)``, those of a token being consecutive.
    """
    patches: int
    """Number of patches of each token."""
    scored: nn.Module
    """The module before which norms are taken, called with patches in the same order."""
    joined: bool = False
    """Whether both modules are called with tokens ``(..., patches * C)`` instead."""
    channels_first: bool = False
    """Whether the channels of such a token are ordered ``(C, patches)``."""

    def split(self, *inputs: Any, **named: Any) -> Tensor:
        """The input of a module as ``(N, patches, C)``."""
        patches: Tensor = inputs[0]
        width = patches.shape[-1] // (self.patches if self.joined else 1)
        if self.channels_first:
            return patches.reshape(-1, width, self.patches).transpose(1, 2)
        return patches.reshape(-1, self.patches, width)

    # Inputs have several times as many numbers as the output, so hooks reduce them at once.

    def hook_rows(self) -> InputHook[Tensor]:
        """Hook that reads tokens ``(N, C)`` float32 of the merger's input: means of patches."""

        def read(*inputs: Tensor, **named: Tensor) -> Tensor:
            return self.split(*inputs, **named).mean(dim=1, dtype=torch.float32)

        return InputHook(self.module, read)

    def hook_norms(self) -> InputHook[Tensor]:
        """Hook that reads L1 and Euclidean norms ``(N, 2)`` float32 of the merger's input.

        Norms are means over a token's patches, or those of its single row if patches are joined.
        """

        def read(*inputs: Tensor, **named: Tensor) -> Tensor:
            patches = self.split(*inputs, **named)
            rows = patches.flatten(1)[:, None] if self.joined else patches
            norm = partial(torch.linalg.vector_norm, rows, dim=2, dtype=torch.float32)
            return torch.stack([norm(ord=1), norm(ord=2)], dim=2).mean(dim=1)

        return InputHook(self.scored, read)


# Attention and keys of the vision-tower layer after the one that the model reads.
#
# vLLM builds the tower only up to the feature layer, so this layer's norm and its two projections
# are copied from the checkpoint while it is loaded.


_PARTS = ("layer_norm1", "self_attn.q_proj", "self_attn.k_proj")
NEXT_LAYER_WEIGHTS = tuple(
    f"{part}.{kind}" for part in _PARTS for kind in ("weight", "bias")
)


class NextTowerLayer:
    """``layer_norm1``, ``q_proj`` and ``k_proj`` of one CLIP layer, unsharded on every rank.

    It is not a module, because vLLM's loader must not look for its weights.
    """

    def __init__(self, config: CLIPVisionConfig, layer: int) -> None:
        width = int(config.hidden_size)
        self._eps = float(config.layer_norm_eps)
        self._layer = layer
        self._weights: dict[str, Tensor] = {}
        self._shapes = {
            name: (width, width) if name.endswith("proj.weight") else (width,)
            for name in NEXT_LAYER_WEIGHTS
        }

    def capture_weights(
        self, weights: Iterable[tuple[str, Tensor]], like: Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """Pass the weights through; copy this layer's to the device and dtype of ``like``.

        If ``like`` is on the meta device, because vLLM loads the model anew, the device and dtype
        of the existing copies are used.
        """
        like = next(iter(self._weights.values()), like)
        names = "|".join(map(re.escape, NEXT_LAYER_WEIGHTS))
        # Checkpoints differ in the prefix before `vision_tower` and in the wrapping of the tower.
        pattern = re.compile(
            rf"(?:^|\.)vision_tower\.(?:vision_model\.)?encoder\.layers\.{self._layer}\.({names})$"
        )
        for name, weight in weights:
            match = pattern.search(name)
            if match is not None:
                self._weights[match[1]] = weight.detach().to(
                    like.device, like.dtype, copy=True
                )
            yield name, weight

    def require_weights(self) -> None:
        """Raise :class:`ConfigError` with every weight that the checkpoint lacks."""
        problems = []
        for name, shape in self._shapes.items():
            where = f"vision_tower...encoder.layers.{self._layer}.{name}"
            weight = self._weights.get(name)
            if weight is None:
                what = "is not in the checkpoint, and the state's base policy reads it"
            elif weight.shape != shape:
                what = f"has shape {tuple(weight.shape)}, not {shape}"
            else:
                continue
            fix = (
                "serve a checkpoint with the whole vision tower, or another base policy"
            )
            problems.append(Problem(where, what, fix))
        if problems:
            raise ConfigError("next layer of the vision tower", problems)

    def init_dummy_weights(self, like: Tensor) -> None:
        """Draw random weights if none were loaded at all (``--load-format dummy``)."""
        if self._weights:
            return
        source = torch.Generator().manual_seed(self._layer)
        for name, shape in self._shapes.items():
            weight = torch.empty(shape).uniform_(-1e-3, 1e-3, generator=source)
            self._weights[name] = weight.to(like.device, like.dtype)

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Attention ``(B, N)`` float32 and keys ``(B, N, Dv)`` of states ``(B, 1 + N, Dv)``.

        Attention is a single head as wide as the tower, over [CLS] and patches: the [CLS] row,
        without the entry of [CLS] itself.
        """
        norm, query, key = (
            (self._weights[f"{part}.weight"], self._weights[f"{part}.bias"])
            for part in _PARTS
        )
        width = hidden.shape[-1]
        normed = functional.layer_norm(hidden, (width,), *norm, self._eps)
        queries = functional.linear(normed[:, 0], *query)
        keys = functional.linear(normed, *key)
        scores = torch.einsum("bd,bnd->bn", queries.float(), keys.float())
        row = (scores * width**-0.5).softmax(dim=-1)
        return row[:, 1:], keys[:, 1:]
