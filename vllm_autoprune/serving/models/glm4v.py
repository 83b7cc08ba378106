"""GLM-4.1V, GLM-4.5V and GLM-4.6V: images of any size, patches merged four to one, M-RoPE.

As Qwen-VL, but for the processor's arithmetic and for videos, whose frames have the images' token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers.models.glm4v.image_processing_glm4v import smart_resize
from vllm.model_executor.models.glm4_1v import (
    Glm4vForConditionalGeneration,
    Glm4vMoeForConditionalGeneration,
)

from vllm_autoprune.serving.api.processor import make_pruned_factories
from vllm_autoprune.serving.models.qwen_vision import QwenVision
from vllm_autoprune.serving.models.qwen_vl import PrunedQwen
from vllm_autoprune.serving.shared.placeholders import Placeholders, TokenCount
from vllm_autoprune.serving.worker.merger_hook import MergerHook

if TYPE_CHECKING:
    from vllm.model_executor.models.glm4_1v import Glm4vProcessingInfo
    from vllm.multimodal.parse import ImageSize


def count_image_tokens(
    info: Glm4vProcessingInfo, size: ImageSize, kwargs: Mapping[str, object]
) -> TokenCount:
    """Merged tokens of an image, resized as the processor resizes it."""
    processor = info.get_image_processor(**kwargs)
    options: dict[str, Any] = dict(info.ctx.get_merged_mm_kwargs(kwargs))
    patches = processor.get_number_of_image_patches(size.height, size.width, options)
    return TokenCount(patches // processor.merge_size**2)


def count_largest_image_tokens(info: Glm4vProcessingInfo) -> TokenCount:
    """Count the tokens of the largest image that the processor accepts."""
    return TokenCount(info.get_max_image_tokens())


def image_token(info: Glm4vProcessingInfo) -> int:
    """The id of ``<|image|>``."""
    token: int = info.get_hf_config().image_token_id
    return token


def shrink_to_budget(info: Glm4vProcessingInfo, size: ImageSize, budget: int) -> ImageSize:
    """The size that the processor's own arithmetic gives an image of at most K merged tokens.

    It counts the pixels of as many frames as one token spans, and leaves a very long and narrow
    image more than K tokens; the longer side of such an image is shortened further.
    """
    vision = info.get_hf_config().vision_config
    unit, frames = vision.patch_size * vision.spatial_merge_size, vision.temporal_patch_size
    height, width = smart_resize(
        frames,
        size.height,
        size.width,
        temporal_factor=frames,
        factor=unit,
        min_pixels=unit**2,
        max_pixels=budget * frames * unit**2,
    )
    return type(size)(width=min(width, budget * unit), height=min(height, budget * unit))


PLACEHOLDERS = Placeholders(
    count_image_tokens, count_largest_image_tokens, image_token, resize=shrink_to_budget
)


class GlmVision(QwenVision):
    """The vision side of GLM-4.xV."""

    def merger_hook(self, patches: int) -> MergerHook:
        """Hook on the norm before the merger's convolution, which sees the last block's output."""
        norm = self._model.visual.post_layernorm
        return MergerHook(norm, patches, norm)


class PrunedGlm(PrunedQwen):
    """Mixin before the stock classes."""

    autoprune_vision = GlmVision
    videos_share_token = True


class AutopruneGlm4vForConditionalGeneration(PrunedGlm, Glm4vForConditionalGeneration):
    """``Glm4vForConditionalGeneration`` with K of N visual tokens where a state is served."""

    _processor_factory = make_pruned_factories(
        Glm4vForConditionalGeneration._processor_factory, PLACEHOLDERS
    )


class AutopruneGlm4vMoeForConditionalGeneration(PrunedGlm, Glm4vMoeForConditionalGeneration):
    """``Glm4vMoeForConditionalGeneration`` with K of N visual tokens where a state is served."""

    _processor_factory = make_pruned_factories(
        Glm4vMoeForConditionalGeneration._processor_factory, PLACEHOLDERS
    )
