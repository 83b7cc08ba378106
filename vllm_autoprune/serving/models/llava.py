"""LLaVA-1.5: one tile an image, with its tokens in raster order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.model_executor.models.llava import LlavaForConditionalGeneration

from vllm_autoprune.serving.api.processor import make_pruned_factories
from vllm_autoprune.serving.models.clip import ClipVision
from vllm_autoprune.serving.models.pruned_model import PrunedModel
from vllm_autoprune.serving.models.vision import (
    EncoderInputs,
    ImageInputs,
    ModelImage,
    split_by_image,
    stack_field,
)
from vllm_autoprune.serving.shared.placeholders import Placeholders, TokenCount
from vllm_autoprune.serving.worker.features import ImageFeatures, Region
from vllm_autoprune.tpdsl.tokens import VisualTokens

if TYPE_CHECKING:
    from vllm.model_executor.models.llava import BaseLlavaProcessingInfo
    from vllm.multimodal.parse import ImageSize


def count_image_tokens(
    info: BaseLlavaProcessingInfo, size: ImageSize, kwargs: Mapping[str, object]
) -> TokenCount:
    """Count the tokens of an image, which is one tile."""
    return TokenCount(info.get_num_image_tokens(image_width=size.width, image_height=size.height))


def count_largest_image_tokens(info: BaseLlavaProcessingInfo) -> TokenCount:
    """Count the tokens of the largest image."""
    return TokenCount(info.get_max_image_tokens())


def image_token(info: BaseLlavaProcessingInfo) -> int:
    """The id of ``<image>``."""
    token: int = info.get_hf_config().image_token_index
    return token


PLACEHOLDERS = Placeholders(count_image_tokens, count_largest_image_tokens, image_token)


class LlavaVision(ClipVision):
    """The vision side of LLaVA-1.5."""

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images of one call of ``embed_multimodal``."""
        self._model._parse_and_validate_image_input(**inputs)
        pixels = {"pixel_values": inputs["pixel_values"]}
        return [ModelImage(one, self.grid.tokens) for one in split_by_image(pixels)]

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images in one pass of the vision tower."""
        tiles = self.encode_tiles(stack_field(images, "pixel_values"))
        # Rows are copied: a view would keep the whole batch alive in the cache.
        regions = [
            Region(
                self.grid,
                tiles.projected[i].clone(),
                None if tiles.attention is None else tiles.attention[i].clone(),
                None if tiles.patches is None else tiles.patches[i].clone(),
                VisualTokens(tiles.projected[i : i + 1], self.grid).cosine[0],
                None if tiles.tower is None else tiles.tower.copy_image(i),
                encoder=None if tiles.encoder is None else tiles.encoder[i].clone(),
            )
            for i in range(len(images))
        ]
        return [ImageFeatures((region,)) for region in regions]


class AutopruneLlavaForConditionalGeneration(PrunedModel, LlavaForConditionalGeneration):
    """``LlavaForConditionalGeneration`` that keeps K of N visual tokens where a state is served."""

    _processor_factory = make_pruned_factories(
        LlavaForConditionalGeneration._processor_factory, PLACEHOLDERS
    )
    autoprune_vision = LlavaVision
