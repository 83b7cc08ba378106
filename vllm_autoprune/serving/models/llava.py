"""LLaVA-1.5: one tile an image, and its tokens are its placeholders, row by row.

Knows nothing about states or atoms; it fills their inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.model_executor.models.llava import LlavaForConditionalGeneration

from vllm_autoprune.serving.features import ImageFeatures, Region
from vllm_autoprune.serving.models.clip import ClipVision
from vllm_autoprune.serving.models.pruned import PrunedModel
from vllm_autoprune.serving.models.vision import Given, Inputs, Shown, each_image, stacked
from vllm_autoprune.serving.placeholders import Extent, Placeholders
from vllm_autoprune.serving.processor import pruned_factories
from vllm_autoprune.tpdsl.tokens import VisualTokens

if TYPE_CHECKING:
    from vllm.model_executor.models.llava import BaseLlavaProcessingInfo
    from vllm.multimodal.parse import ImageSize


def extent(info: BaseLlavaProcessingInfo, size: ImageSize, kwargs: Mapping[str, object]) -> Extent:
    """Every image is one tile."""
    return Extent(info.get_num_image_tokens(image_width=size.width, image_height=size.height))


def most(info: BaseLlavaProcessingInfo) -> Extent:
    """As :func:`extent`, whatever the image."""
    return Extent(info.get_max_image_tokens())


def image_token(info: BaseLlavaProcessingInfo) -> int:
    """The id of ``<image>``."""
    token: int = info.get_hf_config().image_token_index
    return token


PLACEHOLDERS = Placeholders(extent, most, image_token)


class LlavaVision(ClipVision):
    """The vision side of LLaVA-1.5."""

    def images(self, inputs: Given) -> list[Shown]:
        """As :meth:`Vision.images`."""
        self._model._parse_and_validate_image_input(**inputs)
        pixels = {"pixel_values": inputs["pixel_values"]}
        return [Shown(one, self.grid.tokens) for one in each_image(pixels)]

    def encode(self, images: Sequence[Inputs]) -> list[ImageFeatures]:
        """As :meth:`Vision.encode`."""
        made = self.tiles(stacked(images, "pixel_values"))
        # Rows are copied: a view would keep the whole batch alive in the cache.
        regions = [
            Region(
                self.grid,
                made.projected[i].clone(),
                None if made.attention is None else made.attention[i].clone(),
                None if made.patches is None else made.patches[i].clone(),
                VisualTokens(made.projected[i : i + 1], self.grid).cosine[0],
                None if made.tower is None else made.tower.of(i),
            )
            for i in range(len(images))
        ]
        return [ImageFeatures((region,)) for region in regions]


class AutopruneLlavaForConditionalGeneration(PrunedModel, LlavaForConditionalGeneration):
    """``LlavaForConditionalGeneration`` that keeps K of N visual tokens where a state is served."""

    _processor_factory = pruned_factories(
        LlavaForConditionalGeneration._processor_factory, PLACEHOLDERS
    )
    autoprune_vision = LlavaVision
