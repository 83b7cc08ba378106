"""Vision side of models whose image is a number of equal tiles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.serving.unit.samples import served
from vllm_autoprune.serving.models.tiled import TiledVision
from vllm_autoprune.serving.models.vision import ImageInputs

pytestmark = pytest.mark.compat

TOKENS, WIDTH = 4, 3


class Attention(nn.Module):
    """Attention with the call signature of vLLM's ``MMEncoderAttention``."""

    num_heads, scale = 1, 0.5

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value


class TwoByTwoVision(TiledVision):
    """Tiles of four tokens, which are the pixels themselves."""

    pixels = "pixel_values"
    counts = "num_patches"
    _model: Any

    @staticmethod
    def tower(model: Any) -> nn.Module:
        tower: nn.Module = model.attention
        return tower

    def tile_tokens(self) -> int:
        return TOKENS

    def last_attention(self) -> nn.Module:
        attention: nn.Module = self._model.attention
        return attention

    def rows(self, tiles: ImageInputs) -> Tensor:
        pixels = tiles[self.pixels]
        rows: Tensor = self._model.attention(pixels, pixels, pixels)
        return rows


def test_cached_images_do_not_keep_their_batch_alive() -> None:
    state = served({"/base_policy": {"name": "visionzip"}}, cache_bytes=1 << 20)
    vision = TwoByTwoVision(SimpleNamespace(attention=Attention()), state)
    images = [{"pixel_values": torch.randn(tiles, TOKENS, WIDTH)} for tiles in (1, 2)]
    for features, tiles in zip(vision.encode(images), (1, 2), strict=True):
        attention = features.regions[0].cls_attention
        assert attention is not None and attention.shape == (tiles * TOKENS,)
        assert sum(p.untyped_storage().nbytes() for p in features.tensors()) == features.nbytes
