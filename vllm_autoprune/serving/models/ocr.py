"""PaddleOCR-VL and LightOnOCR: pages of any size, patches merged four to one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from packaging.version import Version
from torch import Tensor
from vllm.model_executor.models.lightonocr import LightOnOCRForConditionalGeneration
from vllm.model_executor.models.paddleocr_vl import PaddleOCRVLForConditionalGeneration

from vllm_autoprune.serving.api.layout import TokenCount
from vllm_autoprune.serving.compat import vllm_version
from vllm_autoprune.serving.models.grid import GridVision, prune_grid
from vllm_autoprune.serving.models.pruned_model import EncoderInputs, ImageInputs, ModelImage
from vllm_autoprune.serving.worker.features import ImageFeatures

if TYPE_CHECKING:
    from vllm.model_executor.models.lightonocr import LightOnOCRProcessingInfo
    from vllm.multimodal.parse import ImageSize


class _RasterVision(GridVision):
    """Vision side that encodes images one by one, the patches of each in raster order."""

    cells = merger_cells = False
    joined_images: ClassVar[bool] = False
    """Whether the patches of all images of a call come in one tensor."""

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images of one call."""
        if self.joined_images:
            return super().images(inputs)
        return [
            ModelImage({"pixel_values": part, self.grids: grid}, self.count(grid))
            for part, grid in zip(inputs["pixel_values"], self.find_grids(inputs), strict=True)
        ]

    def find_grids(self, inputs: EncoderInputs) -> Sequence[Tensor]:
        """The row of :attr:`grids` of each image."""
        return [*inputs[self.grids]]

    def rows(self, pixels: Tensor, grids: Tensor) -> Sequence[Tensor]:
        """Rows ``(N, D)`` of one image in raster order, as the stock model makes them."""
        return super().rows(pixels if self.joined_images else pixels[None], grids)

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images, each in a pass of its own."""
        return [features for image in images for features in GridVision.encode(self, [image])]


class _PaddleVision(_RasterVision):
    """PaddleOCR-VL, whose tower gets one image at a time in vLLM 0.32 too."""

    layers, attention_name = "visual.vision_model.encoder.layers", "self_attn.attn"
    merger_name = "mlp_AR.pre_norm"
    joined_images = vllm_version() >= Version("0.33")

    @staticmethod
    def count_largest(info: Any) -> TokenCount:
        """Merged tokens of the image that has most of them."""
        return GridVision.count_tokens(info, info.get_image_size_with_most_features(), {})


class _LightOnVision(_RasterVision):
    """LightOnOCR: the tower of Mistral 3, without breaks behind rows."""

    tower_name, layers = "vision_tower", "vision_tower.transformer.layers"
    attention_name = "attention.attn"
    merger_name = "multi_modal_projector.norm"
    image_token = "image_token_index"
    resizes = False

    @property
    def merge(self) -> int:
        """Patches on each side of a token."""
        return int(self._model.config.spatial_merge_size)

    def find_grids(self, inputs: EncoderInputs) -> Sequence[Tensor]:
        """Patches of each image in height and width, ``(2,)``."""
        patch = self._model.config.vision_config.patch_size
        return [torch.tensor(pixels.shape[-2:]) // patch for pixels in inputs["pixel_values"]]

    @staticmethod
    def count_tokens(
        info: LightOnOCRProcessingInfo, size: ImageSize, kwargs: Mapping[str, object]
    ) -> TokenCount:
        """Merged tokens of an image, resized as the processor resizes it."""
        tokens = info.get_num_image_tokens(image_width=size.width, image_height=size.height)
        return TokenCount(tokens)

    @staticmethod
    def count_largest(info: LightOnOCRProcessingInfo) -> TokenCount:
        """Merged tokens of the image that has most of them."""
        return _LightOnVision.count_tokens(info, info.get_image_size_with_most_features(), {})


AutoprunePaddleOCRVLForConditionalGeneration = prune_grid(
    PaddleOCRVLForConditionalGeneration, _PaddleVision, merger="Projector"
)
AutopruneLightOnOCRForConditionalGeneration = prune_grid(
    LightOnOCRForConditionalGeneration,
    _LightOnVision,
    merger="mistral3.Mistral3MultiModalProjector",
)
