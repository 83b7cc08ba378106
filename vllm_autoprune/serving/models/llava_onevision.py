"""LLaVA-OneVision: tiles of any resolution through a SigLIP tower, shrunk where there are many.

Videos are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.models.llava_onevision import LlavaOnevisionForConditionalGeneration

from vllm_autoprune.serving.api.processor import make_pruned_factories
from vllm_autoprune.serving.models.any_resolution import Join, join_features, split_joined_images
from vllm_autoprune.serving.models.llava_next import PLACEHOLDERS
from vllm_autoprune.serving.models.pruned_model import PrunedModel
from vllm_autoprune.serving.models.vision import (
    EncoderInputs,
    ImageInputs,
    ModelImage,
    Tiles,
    Vision,
)
from vllm_autoprune.serving.shared.served_state import ServedState
from vllm_autoprune.serving.worker.attention_hook import AttentionHook
from vllm_autoprune.serving.worker.features import ImageFeatures


class OnevisionVision(Vision):
    """The vision side of LLaVA-OneVision."""

    _model: LlavaOnevisionForConditionalGeneration

    def __init__(self, model: LlavaOnevisionForConditionalGeneration, served: ServedState) -> None:
        super().__init__(model, served)
        layers = model.vision_tower.vision_model.encoder.layers
        reads = "cls_attention" in self.needs
        self._attention_hook = AttentionHook(layers[-1].self_attn.attn) if reads else None

    @staticmethod
    def tower(model: LlavaOnevisionForConditionalGeneration) -> nn.Module:
        """The model's vision tower."""
        tower: nn.Module = model.vision_tower
        return tower

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images of one call of ``embed_multimodal``."""
        self._model._parse_and_validate_image_input(**inputs)
        return split_joined_images(inputs, self._join, self._model.config)

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images: all their tiles go through the vision tower in one pass."""
        model = self._model
        counts = [len(image["pixel_values"]) for image in images]
        pixels = torch.cat([image["pixel_values"] for image in images])
        with nullcontext() if self._attention_hook is None else self._attention_hook.recording():
            hidden = model._image_pixels_to_features(model.vision_tower, pixels)
        tiles = Tiles(
            model.multi_modal_projector(hidden),
            None if self._attention_hook is None else torch.stack(self._attention_hook.take()),
        )
        return [
            join_features(one, image, self._join, model.image_newline, model.config)
            for image, one in zip(images, tiles.split(counts), strict=True)
        ]

    def _join(self, image: ImageInputs) -> Join:
        size: Any = image["image_sizes"]
        merge = LlavaOnevisionForConditionalGeneration._merge_image_patch_embeddings

        def join(tiles: Tensor, newline: Tensor) -> Tensor:
            # The method reads no other part of the model, so it can be called with marked tiles.
            model = SimpleNamespace(config=self._model.config, image_newline=newline)
            rows: Tensor = merge(
                model, size, tiles, image_newline=newline, strategy="spatial_unpad"
            )
            return rows

        return join


class AutopruneLlavaOnevisionForConditionalGeneration(
    PrunedModel, LlavaOnevisionForConditionalGeneration
):
    """``LlavaOnevisionForConditionalGeneration`` with K of N visual tokens of each image."""

    _processor_factory = make_pruned_factories(
        LlavaOnevisionForConditionalGeneration._processor_factory, PLACEHOLDERS
    )
    autoprune_vision = OnevisionVision
