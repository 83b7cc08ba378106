"""Idefics3 and SmolVLM: tiles and the whole image, each a pixel-shuffled square behind its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from vllm.model_executor.models.idefics3 import Idefics3ForConditionalGeneration
from vllm.model_executor.models.smolvlm import SmolVLMForConditionalGeneration

from vllm_autoprune.serving.api.processor import make_pruned_factories
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.models.pruned_model import PrunedModel
from vllm_autoprune.serving.models.tiled import TiledVision
from vllm_autoprune.serving.models.vision import ImageInputs
from vllm_autoprune.serving.shared.placeholders import Placeholders, TokenCount
from vllm_autoprune.serving.worker.merger_hook import MergerHook

if TYPE_CHECKING:
    from vllm.model_executor.models.idefics3 import Idefics3ProcessingInfo
    from vllm.multimodal.parse import ImageSize


def count_image_tokens(
    info: Idefics3ProcessingInfo, size: ImageSize, kwargs: Mapping[str, object]
) -> TokenCount:
    """Count tokens and tiles: all tiles have equally many, and the whole image is one of them."""
    processor = info.get_hf_processor(**kwargs)
    tokens = info.get_num_image_tokens(
        image_width=size.width, image_height=size.height, processor=processor, mm_kwargs=kwargs
    )
    return TokenCount(tokens, tokens // processor.image_seq_len)


def count_largest_image_tokens(info: Idefics3ProcessingInfo) -> TokenCount:
    """Count the tokens of a square: every image is enlarged until it is cut into tiles."""
    from vllm.multimodal.parse import ImageSize

    edge = info.get_hf_processor().image_processor.max_image_size["longest_edge"]
    return count_image_tokens(info, ImageSize(edge, edge), {})


def image_token(info: Idefics3ProcessingInfo) -> int:
    """The id of ``<image>``."""
    token: int = info.get_hf_processor().image_token_id
    return token


_WHOLE = -1
"""The tile that shows the whole image."""

PLACEHOLDERS = Placeholders(
    count_image_tokens,
    count_largest_image_tokens,
    image_token,
    BACKBONES["Idefics3ForConditionalGeneration"].unsplittable,
    first=_WHOLE,
)


class Idefics3Vision(TiledVision):
    """The vision side of Idefics3 and SmolVLM, which vLLM serves with the same model."""

    _model: Idefics3ForConditionalGeneration
    pixels = "pixel_values"
    masks = "pixel_attention_mask"
    counts = "num_patches"
    apart = True
    first = _WHOLE

    @staticmethod
    def tower(model: Idefics3ForConditionalGeneration) -> nn.Module:
        """The model's vision tower."""
        tower: nn.Module = model.model.vision_model
        return tower

    def tile_tokens(self) -> int:
        """Number of tokens of one square tile, n."""
        return int(self._model.model.image_seq_len)

    def last_attention(self) -> nn.Module:
        """Attention module of the last layer that the model reads."""
        attention: nn.Module = self._model.model.vision_model.encoder.layers[-1].self_attn.attn
        return attention

    def merger_hook(self) -> MergerHook:
        """Hook on the projection, which gets the patches of a token as one row."""
        connector = self._model.model.connector
        projection = connector.modality_projection
        return MergerHook(projection, connector.scale_factor**2, projection, joined=True)

    def rows(self, tiles: ImageInputs) -> Tensor:
        """Projected rows ``(M, n, D)`` of tiles ``(M, 3, H, W)``, also of blank tiles.

        The stock model drops tiles of zeros as padding. A plain grey picture has such tiles, and
        its placeholders count them.
        """
        if self.graphs is not None:
            each = torch.ones(len(tiles[self.pixels]), dtype=torch.int64)
            return torch.stack(list(self.graphs({**tiles, self.counts: each})))
        model = self._model.model
        features = model.image_pixels_to_features(
            tiles[self.pixels], tiles[self.masks], remove_padding=False
        )
        rows: Tensor = model.connector(features)
        return rows


class AutopruneIdefics3ForConditionalGeneration(PrunedModel, Idefics3ForConditionalGeneration):
    """``Idefics3ForConditionalGeneration`` with K of N visual tokens where a state is served."""

    _processor_factory = make_pruned_factories(
        Idefics3ForConditionalGeneration._processor_factory, PLACEHOLDERS
    )
    autoprune_vision = Idefics3Vision


class AutopruneSmolVLMForConditionalGeneration(PrunedModel, SmolVLMForConditionalGeneration):
    """``SmolVLMForConditionalGeneration`` with K of N visual tokens where a state is served."""

    _processor_factory = make_pruned_factories(
        SmolVLMForConditionalGeneration._processor_factory, PLACEHOLDERS
    )
    autoprune_vision = Idefics3Vision
