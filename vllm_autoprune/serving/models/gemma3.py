"""Gemma 3: one pooled square of tokens an image, and one for each crop of pan-and-scan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from vllm.model_executor.models.gemma3_mm import Gemma3ForConditionalGeneration

from vllm_autoprune.serving.api.processor import make_pruned_factories
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.models.pruned_model import PrunedModel
from vllm_autoprune.serving.models.tiled import (
    TiledVision,
    count_image_tokens,
    count_largest_image_tokens,
)
from vllm_autoprune.serving.models.vision import ImageInputs
from vllm_autoprune.serving.shared.placeholders import Placeholders

if TYPE_CHECKING:
    from vllm.model_executor.models.gemma3_mm import Gemma3ProcessingInfo


def image_token(info: Gemma3ProcessingInfo) -> int:
    """The id of ``<image_soft_token>``."""
    token: int = info.get_hf_config().image_token_index
    return token


class Gemma3Vision(TiledVision):
    """The vision side of Gemma 3."""

    _model: Gemma3ForConditionalGeneration
    pixels = "pixel_values"
    counts = "num_patches"
    apart = True

    @staticmethod
    def tower(model: Gemma3ForConditionalGeneration) -> nn.Module:
        """The model's vision tower."""
        tower: nn.Module = model.vision_tower
        return tower

    def tile_tokens(self) -> int:
        """Number of tokens of one square tile, n."""
        return int(self._model.config.mm_tokens_per_image)

    def last_attention(self) -> nn.Module:
        """Attention module of the last layer that the model reads."""
        layers = self._model.vision_tower.vision_model.encoder.layers
        attention: nn.Module = layers[-1].self_attn.attn
        return attention

    def rows(self, tiles: ImageInputs) -> Tensor:
        """Projected rows ``(M, n, D)`` of tiles ``(M, 3, H, W)``, as in the stock model."""
        model, pixels = self._model, tiles[self.pixels]
        if self.graphs is not None:
            each = torch.ones(len(pixels), dtype=torch.int64)
            return torch.stack(list(self.graphs({self.pixels: pixels, self.counts: each})))
        features = model._image_pixels_to_features(model.vision_tower, pixels)
        rows: Tensor = model.multi_modal_projector(features)
        return rows


class AutopruneGemma3ForConditionalGeneration(PrunedModel, Gemma3ForConditionalGeneration):
    """``Gemma3ForConditionalGeneration`` with K of N visual tokens where a state is served."""

    _processor_factory = make_pruned_factories(
        Gemma3ForConditionalGeneration._processor_factory,
        Placeholders(
            count_image_tokens,
            count_largest_image_tokens,
            image_token,
            BACKBONES["Gemma3ForConditionalGeneration"].unsplittable,
        ),
    )
    autoprune_vision = Gemma3Vision
