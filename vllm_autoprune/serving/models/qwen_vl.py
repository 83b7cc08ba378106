"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5: images of any size, patches merged four to one, M-RoPE.

Videos are left as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
from vllm.model_executor.models.qwen3_5 import (
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
)
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration

from vllm_autoprune.serving.api.processor import make_pruned_factories
from vllm_autoprune.serving.compat.worker import UNCHANGED_DELTA, keep_deltas, request_positions
from vllm_autoprune.serving.models.pruned_model import PrunedModel
from vllm_autoprune.serving.models.qwen_vision import QwenVision
from vllm_autoprune.serving.shared.placeholders import Placeholders, TokenCount
from vllm_autoprune.serving.shared.plan import FIELD
from vllm_autoprune.serving.shared.served_state import served_state
from vllm_autoprune.serving.worker.mrope import (
    CHANNELS,
    compute_input_positions,
    match_items,
    place_image_tokens,
    unplaced_channels,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.interfaces import MultiModalEmbeddings
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as _Stock
    from vllm.model_executor.models.qwen2_vl import Qwen2VLProcessingInfo
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.multimodal.parse import ImageSize
else:
    _Stock = object


def count_image_tokens(
    info: Qwen2VLProcessingInfo, size: ImageSize, kwargs: Mapping[str, object]
) -> TokenCount:
    """Merged tokens of an image, resized as the processor resizes it."""
    processor = info.get_image_processor(**kwargs)
    tokens = info.get_num_image_tokens(
        image_width=size.width,
        image_height=size.height,
        image_processor=processor,
        mm_kwargs=kwargs,
    )
    return TokenCount(tokens)


def count_largest_image_tokens(info: Qwen2VLProcessingInfo) -> TokenCount:
    """Count the tokens of the largest image that the processor accepts."""
    return TokenCount(info.get_max_image_tokens())


def image_token(info: Qwen2VLProcessingInfo) -> int:
    """The id of ``<|image_pad|>``."""
    token: int = info.get_hf_config().image_token_id
    return token


def shrink_to_budget(info: Qwen2VLProcessingInfo, size: ImageSize, budget: int) -> ImageSize:
    """The size that the processor's own arithmetic gives an image of at most K merged tokens.

    It leaves a very long and narrow image more than K tokens; the longer side of such an image is
    shortened further.
    """
    vision = info.get_hf_config().vision_config
    unit = vision.patch_size * vision.spatial_merge_size
    height, width = smart_resize(
        size.height, size.width, factor=unit, min_pixels=unit**2, max_pixels=budget * unit**2
    )
    return type(size)(width=min(width, budget * unit), height=min(height, budget * unit))


PLACEHOLDERS = Placeholders(
    count_image_tokens, count_largest_image_tokens, image_token, resize=shrink_to_budget
)


class PrunedQwen(PrunedModel, _Stock):
    """Mixin before the stock classes."""

    autoprune_vision: ClassVar[type[QwenVision]] = QwenVision
    supports_multimodal_pruning: ClassVar[Literal[True]] = True
    """vLLM asks a model for positions anew only where it says this."""
    videos_share_token: ClassVar[bool] = False
    """Whether frames of videos have the same placeholder token as images."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        if served_state(vllm_config.model_config) is not None:
            request_positions(vllm_config.model_config.multimodal_config)
            keep_deltas()
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if self.autoprune is not None:
            # Videos are handled by the stock model.
            self.is_multimodal_pruning_enabled = False

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings | None:
        """Embed images and videos; rows of images carry their positions."""
        vision = self.autoprune
        if isinstance(vision, QwenVision) and kwargs.get("image_embeds") is not None:
            return vision.embeddings_with_positions(
                {n: g for n, g in kwargs.items() if isinstance(g, Tensor | list)}
            )
        return super().embed_multimodal(**kwargs)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        """Positions of the prompt with whole images, as stock (``SupportsMRoPE``)."""
        stock = super().get_mrope_input_positions
        if self.autoprune is None:
            return stock(input_tokens, mm_features)
        unpruned, plans = {}, {}
        for i, feature in enumerate(mm_features):
            if feature.modality == "image":
                assert feature.data is not None
                grid = feature.data["image_grid_thw"].data
                assert isinstance(grid, Tensor)
                unpruned[i] = int(grid.prod()) // self.config.vision_config.spatial_merge_size**2
                if FIELD in feature.data:
                    (plans[i],) = self.autoprune_plan_reader.read([feature.data[FIELD].data])
        firsts = match_items(plans)
        return compute_input_positions(stock, input_tokens, mm_features, unpruned, firsts)

    def recompute_mrope_positions(
        self,
        input_ids: list[int] | Tensor,
        multimodal_embeddings: Sequence[Tensor],
        mrope_positions: Tensor,
        num_computed_tokens: int,
    ) -> tuple[Sequence[Tensor], Tensor, int]:
        """Split position channels off the rows, and set the positions of this step's image tokens.

        Not by the stock method (``SupportsMultiModalPruning``): it moves text on by an image's
        width, which is wrong for one that is higher than wide. What decoding adds to the prompt's
        length was known before. Model Runner V1 has no way to leave it as it is, so there a prompt
        that ends in an image, without the token that closes it, goes on after the last kept token.
        """
        vision = self.autoprune
        assert isinstance(vision, QwenVision)
        wide = vision.row_width + CHANNELS
        rows: list[Tensor] = []
        channels: list[Tensor] = []
        for one in multimodal_embeddings:
            if one.shape[1] == wide:
                channels.append(one[:, -CHANNELS:])
                one = one[:, :-CHANNELS]
            elif self.videos_share_token:
                channels.append(unplaced_channels(one))
            rows.append(one)
        positions = mrope_positions
        if channels:
            ids = input_ids if isinstance(input_ids, Tensor) else torch.tensor(input_ids)
            image = self.config.image_token_id
            positions = place_image_tokens(ids, positions, channels, image, num_computed_tokens)
        if isinstance(input_ids, Tensor):
            return rows, positions, UNCHANGED_DELTA
        return rows, positions, int(positions.max()) + 1 - len(input_ids)


class AutopruneQwen2VLForConditionalGeneration(PrunedQwen, Qwen2VLForConditionalGeneration):
    """``Qwen2VLForConditionalGeneration`` with K of N visual tokens where a state is served."""

    _processor_factory = make_pruned_factories(
        Qwen2VLForConditionalGeneration._processor_factory, PLACEHOLDERS
    )


class AutopruneQwen2_5_VLForConditionalGeneration(PrunedQwen, Qwen2_5_VLForConditionalGeneration):
    """``Qwen2_5_VLForConditionalGeneration`` with K of N visual tokens where a state is served."""

    _processor_factory = make_pruned_factories(
        Qwen2_5_VLForConditionalGeneration._processor_factory, PLACEHOLDERS
    )


class AutopruneQwen3VLForConditionalGeneration(PrunedQwen, Qwen3VLForConditionalGeneration):
    """``Qwen3VLForConditionalGeneration`` with K of N visual tokens where a state is served."""

    _processor_factory = make_pruned_factories(
        Qwen3VLForConditionalGeneration._processor_factory, PLACEHOLDERS
    )


class AutopruneQwen3VLMoeForConditionalGeneration(PrunedQwen, Qwen3VLMoeForConditionalGeneration):
    """``Qwen3VLMoeForConditionalGeneration`` with K of N visual tokens where a state is served."""

    _processor_factory = make_pruned_factories(
        Qwen3VLMoeForConditionalGeneration._processor_factory, PLACEHOLDERS
    )


class AutopruneQwen3_5ForConditionalGeneration(PrunedQwen, Qwen3_5ForConditionalGeneration):
    """``Qwen3_5ForConditionalGeneration`` with K of N visual tokens where a state is served."""

    _processor_factory = make_pruned_factories(
        Qwen3_5ForConditionalGeneration._processor_factory, PLACEHOLDERS
    )


class AutopruneQwen3_5MoeForConditionalGeneration(PrunedQwen, Qwen3_5MoeForConditionalGeneration):
    """``Qwen3_5MoeForConditionalGeneration`` with K of N visual tokens where a state is served."""

    _processor_factory = make_pruned_factories(
        Qwen3_5MoeForConditionalGeneration._processor_factory, PLACEHOLDERS
    )
