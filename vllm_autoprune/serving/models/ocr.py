"""PaddleOCR-VL, LightOnOCR, dots.ocr, Mistral 3: images of any size, four patches a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from torch import Tensor
from vllm.model_executor.models.dots_ocr import DotsOCRForCausalLM
from vllm.model_executor.models.lightonocr import LightOnOCRForConditionalGeneration
from vllm.model_executor.models.mistral3 import Mistral3ForConditionalGeneration
from vllm.model_executor.models.paddleocr_vl import PaddleOCRVLForConditionalGeneration

from vllm_autoprune.serving.api.placeholders import TokenCount
from vllm_autoprune.serving.compat import vllm_version
from vllm_autoprune.serving.models.grid import GridVision, prune_grid
from vllm_autoprune.serving.models.vision import EncoderInputs, ImageInputs
from vllm_autoprune.serving.worker.features import ImageFeatures
from vllm_autoprune.serving.worker.tower_hooks import Merger

if TYPE_CHECKING:
    from vllm.model_executor.models.mistral3 import Mistral3ProcessingInfo
    from vllm.multimodal.parse import ImageSize


class _RasterVision(GridVision):
    """Vision side that encodes images one by one, with the patches of each in raster order."""

    cells = merger_cells = False

    @classmethod
    def count_largest(cls, info: Any) -> TokenCount:
        """Number of merged tokens of the image that has most of them."""
        return cls.count_tokens(info, info.get_image_size_with_most_features(), {})

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images, each in a pass of its own."""
        return [
            features
            for image in images
            for features in GridVision.encode(self, [image])
        ]


class _PaddleVision(_RasterVision):
    """PaddleOCR-VL, whose tower takes one image at a time, in vLLM 0.32 too."""

    layers = "visual.vision_model.encoder.layers"
    attention_name = "self_attn.attn"
    merger_name = "mlp_AR.pre_norm"
    joined_images = vllm_version() >= Version("0.33")


class _LightOnVision(_RasterVision):
    """LightOnOCR, with a Pixtral tower."""

    tower_name = "vision_tower"
    layers = "vision_tower.transformer.layers"
    attention_name = "attention.attn"
    merger_name = "multi_modal_projector.norm"
    image_token = "image_token_index"
    joined_images = resizes = False

    @property
    def merge(self) -> int:
        """Side, in patches, of the square that becomes one token."""
        return int(self._model.config.spatial_merge_size)

    def find_grids(self, inputs: EncoderInputs) -> Tensor:
        """Number of patches of each image in height and width, ``(B, 2)``."""
        sizes = torch.tensor([pixels.shape[-2:] for pixels in inputs["pixel_values"]])
        return sizes // self._model.config.vision_config.patch_size

    @staticmethod
    def count_tokens(
        info: Mistral3ProcessingInfo, size: ImageSize, kwargs: Mapping[str, object]
    ) -> TokenCount:
        """Number of merged tokens of an image, resized as by the processor, without row breaks."""
        encoder = info.get_vision_encoder_info(kwargs)
        tokens = encoder.get_num_image_tokens(
            image_width=size.width, image_height=size.height
        )
        return TokenCount(tokens)


class _Mistral3Vision(_LightOnVision):
    """Mistral 3 (Mistral Small 3.1, Ministral 3), with a break token after each row.

    All breaks keep their places: the language model has 1-D positions, so a token's row in the
    image can only be told by the number of breaks before it.
    """

    ordered = True

    def find_merger(self) -> Merger:
        """The merging layer, which takes the patches of a token as one row, channel by channel."""
        layer = self._model.multi_modal_projector.patch_merger.merging_layer
        return Merger(layer, self.merge**2, layer, joined=True, channels_first=True)

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images in one pass of the vision tower."""
        return GridVision.encode(self, images)


class _DotsVision(GridVision):
    """dots.ocr, whose tower takes and merges patches as Qwen2-VL's does."""

    tower_name = "vision_tower"
    layers = "vision_tower.blocks"
    merger_name = "vision_tower.merger.ln_q"


AutoprunePaddleOCRVLForConditionalGeneration = prune_grid(
    PaddleOCRVLForConditionalGeneration, _PaddleVision, merger="Projector"
)
AutopruneLightOnOCRForConditionalGeneration = prune_grid(
    LightOnOCRForConditionalGeneration,
    _LightOnVision,
    merger="mistral3.Mistral3MultiModalProjector",
)
AutopruneDotsOCRForCausalLM = prune_grid(
    DotsOCRForCausalLM, _DotsVision, merger="PatchMerger"
)
AutopruneMistral3ForConditionalGeneration = prune_grid(
    Mistral3ForConditionalGeneration, _Mistral3Vision, merger="Mistral3PatchMerger"
)
