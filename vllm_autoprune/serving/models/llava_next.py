"""LLaVA-NeXT: tiles of any resolution through a CLIP tower.

Knows nothing about how tiles are joined into rows: ``any_resolution`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape
from vllm.model_executor.models.llava_next import LlavaNextForConditionalGeneration

from vllm_autoprune.serving.features import ImageFeatures
from vllm_autoprune.serving.models.any_resolution import Join, any_resolution, each_joined
from vllm_autoprune.serving.models.clip import ClipVision
from vllm_autoprune.serving.models.llava import image_token
from vllm_autoprune.serving.models.pruned import PrunedModel
from vllm_autoprune.serving.models.vision import Given, Inputs, Shown
from vllm_autoprune.serving.placeholders import Extent, Placeholders
from vllm_autoprune.serving.processor import pruned_factories

if TYPE_CHECKING:
    from vllm.model_executor.models.llava_next import LlavaNextProcessingInfo
    from vllm.multimodal.parse import ImageSize


def extent(info: LlavaNextProcessingInfo, size: ImageSize, kwargs: Mapping[str, object]) -> Extent:
    """Base view, unpadded crops and their newlines; tiles are the base view and the crops."""
    tokens = info.get_num_image_tokens(image_width=size.width, image_height=size.height)
    config = info.get_hf_config()
    rows, columns = get_anyres_image_grid_shape(
        image_size=(size.height, size.width),
        grid_pinpoints=config.image_grid_pinpoints,
        patch_size=config.vision_config.image_size,
    )
    return Extent(tokens, 1 + rows * columns)


def most(info: LlavaNextProcessingInfo) -> Extent:
    """Of the image size with most tokens."""
    return extent(info, info.get_image_size_with_most_features(), {})


PLACEHOLDERS = Placeholders(extent, most, image_token)


class LlavaNextVision(ClipVision):
    """The vision side of LLaVA-NeXT."""

    def images(self, inputs: Given) -> list[Shown]:
        """As :meth:`Vision.images`."""
        self._model._parse_and_validate_image_input(**inputs)
        return each_joined(inputs, self._join, self.grid.height)

    def encode(self, images: Sequence[Inputs]) -> list[ImageFeatures]:
        """As :meth:`Vision.encode`: all tiles of all images go through the tower at once."""
        counts = [len(image["pixel_values"]) for image in images]
        made = self.tiles(torch.cat([image["pixel_values"] for image in images]))
        newline, side = self._model.image_newline, self.grid.height
        return [
            any_resolution(one, self._join(image), newline, side)
            for image, one in zip(images, made.split(counts), strict=True)
        ]

    def _join(self, image: Inputs) -> Join:
        size: Any = image["image_sizes"]
        merge = LlavaNextForConditionalGeneration._merge_image_patch_embeddings

        def join(tiles: Tensor, newline: Tensor) -> Tensor:
            # The method reads no other part of the model, so anything can be sent through it.
            model = SimpleNamespace(config=self._model.config, image_newline=newline)
            rows: Tensor = merge(model, size, tiles, strategy="spatial_unpad")
            return rows

        return join


class AutopruneLlavaNextForConditionalGeneration(PrunedModel, LlavaNextForConditionalGeneration):
    """``LlavaNextForConditionalGeneration`` with K of N visual tokens where a state is served."""

    _processor_factory = pruned_factories(
        LlavaNextForConditionalGeneration._processor_factory, PLACEHOLDERS
    )
    autoprune_vision = LlavaNextVision
