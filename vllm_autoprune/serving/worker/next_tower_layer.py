"""Attention and keys of the vision-tower layer after the one that the model reads.

vLLM builds the tower only up to the feature layer, so this layer's norm and its two projections
are copied from the checkpoint while it is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from vllm_autoprune.errors import ConfigError, Problem

if TYPE_CHECKING:
    from transformers import CLIPVisionConfig

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
            own = self._own.search(name)
            if own is not None:
                self._weights[own[1]] = weight.detach().to(like.device, like.dtype, copy=True)
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
