"""Qwen-VL, GLM-4.xV and similar models: images of any size, patches merged four to one, M-RoPE.

Their videos are pruned too, but not those of Qwen-Omni, Cosmos 3 Edge, Cohere Compass, GLM-OCR.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from transformers.models.glm4v.image_processing_glm4v import smart_resize
from vllm.model_executor.models.cohere_compass import (
    CohereCompassForConditionalGeneration,
)
from vllm.model_executor.models.cosmos3 import Cosmos3ForConditionalGeneration
from vllm.model_executor.models.cosmos3_edge import Cosmos3EdgeForConditionalGeneration
from vllm.model_executor.models.exaone4_5 import Exaone4_5_ForConditionalGeneration
from vllm.model_executor.models.glm4_1v import (
    Glm4vForConditionalGeneration,
    Glm4vMoeForConditionalGeneration,
)
from vllm.model_executor.models.glm_ocr import GlmOcrForConditionalGeneration
from vllm.model_executor.models.qwen2_5_omni_thinker import (
    Qwen2_5OmniThinkerForConditionalGeneration,
)
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
from vllm.model_executor.models.qwen3_5 import (
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
)
from vllm.model_executor.models.qwen3_omni_moe_thinker import (
    Qwen3OmniMoeThinkerForConditionalGeneration,
)
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration

from vllm_autoprune.serving.api.placeholders import TokenCount
from vllm_autoprune.serving.models.grid import GridVision, prune_grid
from vllm_autoprune.serving.worker.tower_hooks import Merger

if TYPE_CHECKING:
    from vllm.model_executor.models.glm4_1v import Glm4vProcessingInfo
    from vllm.multimodal.parse import ImageSize


class _Qwen2Vision(GridVision):
    """Qwen2-VL.

    vLLM calls its merger without running hooks. The merger's norm runs first, on the same input, so
    it is hooked instead.
    """

    merger_name = "visual.merger.ln_q"
    video_token = "video_token_id"


class _Qwen2_5Vision(_Qwen2Vision):
    """Qwen2.5-VL, whose tower processes patches in window order."""

    def find_attention(self) -> Any:
        """Attention of the last block in which every patch of an image sees every other."""
        tower = self._model.visual
        return tower.blocks[max(tower.fullatt_block_indexes)].attn.attn

    def tower_order(self, grids: Tensor) -> Tensor:
        """Indices ``(N,)`` of all tokens within the tower, in raster order."""
        metadata = self._model.visual.prepare_encoder_metadata(grids.tolist())
        order: Tensor = metadata["reverse_indices"]
        return order.to(self.sample_weight.device, non_blocking=True)


class _ExaoneVision(_Qwen2_5Vision):
    """EXAONE 4.5, whose videos are left whole."""

    video_token = ""


class _Qwen2_5OmniVision(_Qwen2_5Vision):
    """Qwen2.5-Omni, whose videos may have sound among their tokens: they are left whole."""

    video_token = ""


class _Qwen3Vision(GridVision):
    """Qwen3-VL, Qwen3.5 and Cosmos 3; rows of later layers (deepstack) are pruned as well."""

    merger_name = "visual.merger"
    level_mergers: ClassVar[str] = "visual.deepstack_merger_list"
    """Dotted name of the mergers of the deepstack levels."""
    video_token = "video_token_id"
    dates_frames = True

    @property
    def row_width(self) -> int:
        """Width of a row without positions: D, plus D for every deepstack level."""
        return self._width * (1 + int(self._model.deepstack_num_level))

    def find_merger(self) -> Merger:
        """The merger of the last block; norms are taken at the first deepstack merger."""
        merger = super().find_merger()
        levels = attrgetter(self.level_mergers)(self._model)
        return merger._replace(scored=next(iter(levels), merger.module))


class _Qwen3OmniVision(_Qwen3Vision):
    """Qwen3-Omni, whose videos may have sound among their tokens: they are left whole."""

    level_mergers = "visual.merger_list"
    video_token = ""
    dates_frames = False


class _Cosmos3EdgeVision(GridVision):
    """Cosmos 3 Edge, with a SigLIP2 tower; its videos are left whole."""

    layers = "visual.encoder.encoder.layers"
    attention_name = "self_attn.attn"
    merger_name = "visual.projector"
    cells = False
    dates_frames = True


class _CompassVision(_Qwen3Vision):
    """Cohere Compass, whose videos are left whole."""

    video_token = ""


class _GlmVision(GridVision):
    """GLM-4.xV: merges by a convolution after a norm, which sees the last block's output."""

    merger_name = "visual.post_layernorm"
    video_token = "video_token_id"
    videos_share_token = True
    dates_frames = True

    @staticmethod
    def count_tokens(
        info: Glm4vProcessingInfo, size: ImageSize, kwargs: Mapping[str, object]
    ) -> TokenCount:
        """Number of merged tokens of an image, resized as the processor resizes it."""
        processor = info.get_image_processor(**kwargs)
        options: dict[str, Any] = dict(info.ctx.get_merged_mm_kwargs(kwargs))
        patches = processor.get_number_of_image_patches(
            size.height, size.width, options
        )
        return TokenCount(patches // processor.merge_size**2)

    @staticmethod
    def shrink_to_budget(
        info: Glm4vProcessingInfo, size: ImageSize, budget: int
    ) -> ImageSize:
        """As for Qwen-VL, but pixels are counted over all frames that a token spans."""
        vision = info.get_hf_config().vision_config
        unit = vision.patch_size * vision.spatial_merge_size
        frames = vision.temporal_patch_size
        height, width = smart_resize(
            frames,
            size.height,
            size.width,
            temporal_factor=frames,
            factor=unit,
            min_pixels=unit**2,
            max_pixels=budget * frames * unit**2,
        )
        return type(size)(
            width=min(width, budget * unit), height=min(height, budget * unit)
        )


class _GlmOcrVision(_GlmVision):
    """GLM-OCR, whose videos are left whole."""

    video_token = ""


AutopruneQwen2VLForConditionalGeneration = prune_grid(
    Qwen2VLForConditionalGeneration, _Qwen2Vision, merger="Qwen2VisionPatchMerger"
)
AutopruneQwen2_5_VLForConditionalGeneration = prune_grid(
    Qwen2_5_VLForConditionalGeneration,
    _Qwen2_5Vision,
    merger="Qwen2_5_VisionPatchMerger",
)
AutopruneExaone4_5_ForConditionalGeneration = prune_grid(
    Exaone4_5_ForConditionalGeneration,
    _ExaoneVision,
    merger="qwen2_5_vl.Qwen2_5_VisionPatchMerger",
    mrope=False,
)
AutopruneQwen3VLForConditionalGeneration = prune_grid(
    Qwen3VLForConditionalGeneration, _Qwen3Vision, merger="Qwen3_VisionPatchMerger"
)
AutopruneQwen3VLMoeForConditionalGeneration = prune_grid(
    Qwen3VLMoeForConditionalGeneration, _Qwen3Vision
)
AutopruneQwen3_5ForConditionalGeneration = prune_grid(
    Qwen3_5ForConditionalGeneration, _Qwen3Vision
)
AutopruneQwen3_5MoeForConditionalGeneration = prune_grid(
    Qwen3_5MoeForConditionalGeneration, _Qwen3Vision
)
AutopruneCosmos3ForConditionalGeneration = prune_grid(
    Cosmos3ForConditionalGeneration, _Qwen3Vision
)
AutopruneCosmos3EdgeForConditionalGeneration = prune_grid(
    Cosmos3EdgeForConditionalGeneration,
    _Cosmos3EdgeVision,
    merger="Cosmos3EdgePatchMerger",
)
AutopruneCohereCompassForConditionalGeneration = prune_grid(
    CohereCompassForConditionalGeneration,
    _CompassVision,
    merger="Cohere_VisionPatchMerger",
)
AutopruneGlm4vForConditionalGeneration = prune_grid(
    Glm4vForConditionalGeneration, _GlmVision
)
AutopruneGlm4vMoeForConditionalGeneration = prune_grid(
    Glm4vMoeForConditionalGeneration, _GlmVision
)
AutopruneGlmOcrForConditionalGeneration = prune_grid(
    GlmOcrForConditionalGeneration, _GlmOcrVision, merger="GlmOcrPatchMerger"
)
AutopruneQwen2_5OmniThinkerForConditionalGeneration = prune_grid(
    Qwen2_5OmniThinkerForConditionalGeneration, _Qwen2_5OmniVision
)
AutopruneQwen3OmniMoeThinkerForConditionalGeneration = prune_grid(
    Qwen3OmniMoeThinkerForConditionalGeneration,
    _Qwen3OmniVision,
    merger="Qwen3_VisionPatchMerger",
)
