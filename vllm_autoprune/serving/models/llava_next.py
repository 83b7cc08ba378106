"""LLaVA-NeXT: tiles of any resolution through a CLIP tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.model_executor.models.llava_next import LlavaNextForConditionalGeneration

from vllm_autoprune.serving.api.processor import make_pruned_factories
from vllm_autoprune.serving.models.any_resolution import (
    Join,
    count_tiles,
    join_features,
    split_joined_images,
)
from vllm_autoprune.serving.models.clip import ClipVision
from vllm_autoprune.serving.models.llava import image_token
from vllm_autoprune.serving.models.pruned_model import PrunedModel
from vllm_autoprune.serving.models.vision import EncoderInputs, ImageInputs, ModelImage
from vllm_autoprune.serving.shared.placeholders import Placeholders, TokenCount
from vllm_autoprune.serving.worker.features import ImageFeatures

if TYPE_CHECKING:
    from vllm.model_executor.models.llava_next import LlavaNextProcessingInfo
    from vllm.multimodal.parse import ImageSize


def count_image_tokens(
    info: LlavaNextProcessingInfo, size: ImageSize, kwargs: Mapping[str, object]
) -> TokenCount:
    """Count base view, unpadded crops and their newlines; tiles are the base view and the crops."""
    tokens = info.get_num_image_tokens(image_width=size.width, image_height=size.height)
    return TokenCount(tokens, count_tiles(info.get_hf_config(), size.height, size.width))


def count_largest_image_tokens(info: LlavaNextProcessingInfo) -> TokenCount:
    """Count the tokens of the image size that has most of them."""
    return count_image_tokens(info, info.get_image_size_with_most_features(), {})


PLACEHOLDERS = Placeholders(count_image_tokens, count_largest_image_tokens, image_token)


class LlavaNextVision(ClipVision):
    """The vision side of LLaVA-NeXT."""

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images of one call of ``embed_multimodal``."""
        self._model._parse_and_validate_image_input(**inputs)
        return split_joined_images(inputs, self._join, self._model.config)

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images: all their tiles go through the vision tower in one pass."""
        counts = [len(image["pixel_values"]) for image in images]
        tiles = self.encode_tiles(torch.cat([image["pixel_values"] for image in images]))
        newline, config = self._model.image_newline, self._model.config
        return [
            join_features(one, image, self._join, newline, config)
            for image, one in zip(images, tiles.split(counts), strict=True)
        ]

    def _join(self, image: ImageInputs) -> Join:
        size: Any = image["image_sizes"]
        merge = LlavaNextForConditionalGeneration._merge_image_patch_embeddings

        def join(tiles: Tensor, newline: Tensor) -> Tensor:
            # The method reads no other part of the model, so it can be called with marked tiles.
            model = SimpleNamespace(config=self._model.config, image_newline=newline)
            rows: Tensor = merge(model, size, tiles, strategy="spatial_unpad")
            return rows

        return join


class AutopruneLlavaNextForConditionalGeneration(PrunedModel, LlavaNextForConditionalGeneration):
    """``LlavaNextForConditionalGeneration`` with K of N visual tokens where a state is served."""

    _processor_factory = make_pruned_factories(
        LlavaNextForConditionalGeneration._processor_factory, PLACEHOLDERS
    )
    autoprune_vision = LlavaNextVision
