"""Mistral 3 (Mistral Small 3.1, Ministral 3): one grid of any size, with a break behind each row.

All breaks stay where they are: the language model has 1-D positions, so that a token's row is the
number of breaks before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.model_executor.models.mistral3 import Mistral3ForConditionalGeneration

from vllm_autoprune.serving.api.layout import Placeholders, TokenCount
from vllm_autoprune.serving.compat import depends_on
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.models.pruned_model import (
    EncoderInputs,
    ImageInputs,
    ModelImage,
    Vision,
    prune_class,
)
from vllm_autoprune.serving.worker.features import ImageFeatures, Signal
from vllm_autoprune.serving.worker.tower_hooks import Merger
from vllm_autoprune.tpdsl.tokens import Grid

if TYPE_CHECKING:
    from vllm.model_executor.models.mistral3 import Mistral3ProcessingInfo
    from vllm.multimodal.parse import ImageSize


@depends_on("vllm.model_executor.models.mistral3:Mistral3PatchMerger", "forward")
class _Mistral3Vision(Vision):
    """The vision side of Mistral 3."""

    _model: Mistral3ForConditionalGeneration
    layers, attention_name = "vision_tower.transformer.layers", "attention.attn"

    def find_merger(self) -> Merger:
        """The merging layer, which gets the patches of a token as one row, channel by channel."""
        merger = self._model.multi_modal_projector.patch_merger
        layer, patches = merger.merging_layer, merger.spatial_merge_size**2
        return Merger(layer, patches, layer, joined=True, channels_first=True)

    def _grid(self, image: ImageInputs) -> Grid:
        config = self._model.config
        unit = config.vision_config.patch_size * config.spatial_merge_size
        height, width = image["pixel_values"].shape[-2:]
        return Grid(height // unit, width // unit)

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images of one call of ``embed_multimodal``."""
        images = [{"pixel_values": pixels} for pixels in inputs["pixel_values"]]
        return [ModelImage(image, self._grid(image).tokens) for image in images]

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images in one pass of the vision tower."""
        pixels = [image["pixel_values"] for image in images]
        with self.recording():
            rows = self._model._process_image_input(
                self._model._parse_and_validate_image_input(pixel_values=pixels)
            )
        grids, merge = (
            [self._grid(image) for image in images],
            self._model.config.spatial_merge_size,
        )
        sizes = [grid.tokens for grid in grids]
        signals: dict[Signal, Sequence[Tensor]] = {
            signal: hook.take().split(sizes) for signal, hook in self.merger.items()
        }
        if self.attention is not None:
            # A token gets the mean of what the patches get that it is made of.
            patches = self.attention.take().received([size * merge**2 for size in sizes])
            signals["cls_attention"] = [
                received.view(grid.height, merge, grid.width, merge).mean(dim=(1, 3)).flatten()
                for received, grid in zip(patches, grids, strict=True)
            ]
        features = []
        for i, (grid, tokens) in enumerate(zip(grids, rows, strict=True)):
            of_image: dict[Signal, Tensor] = {
                signal: parts[i].clone() for signal, parts in signals.items()
            }
            order = torch.arange(grid.tokens, device=tokens.device)
            region = self.make_region(grid, tokens.clone(), of_image, order=order)
            features.append(ImageFeatures((region,)))
        return features


def _count(
    info: Mistral3ProcessingInfo, size: ImageSize, kwargs: Mapping[str, object]
) -> TokenCount:
    """Merged tokens of an image, without the breaks behind its rows."""
    columns, rows = info.get_vision_encoder_info(kwargs).get_patch_grid_size(
        image_width=size.width, image_height=size.height
    )
    return TokenCount(rows * columns)


_BACKBONE = BACKBONES["Mistral3ForConditionalGeneration"]

AutopruneMistral3ForConditionalGeneration = prune_class(
    Mistral3ForConditionalGeneration,
    Placeholders(
        _count,
        lambda info: _count(info, info.get_image_size_with_most_features(), {}),
        lambda info: info.get_hf_config().image_token_index,
        _BACKBONE.unsplittable,
        embeds_text=_BACKBONE.embeds_text,
    ),
    _Mistral3Vision,
    methods=("_parse_and_validate_image_input", "_process_image_input"),
)
