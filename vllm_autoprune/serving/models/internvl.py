"""InternVL of transformers: crops and a thumbnail, each a pixel-shuffled square of tokens.

Videos are left as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from vllm.model_executor.models.interns1 import InternS1ForConditionalGeneration

from vllm_autoprune.serving.api.processor import make_pruned_factories
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.models.pruned_model import PrunedModel
from vllm_autoprune.serving.models.tiled import (
    TiledVision,
    count_image_tokens,
    count_largest_image_tokens,
)
from vllm_autoprune.serving.models.vision import ImageInputs
from vllm_autoprune.serving.shared.placeholders import Placeholders
from vllm_autoprune.serving.worker.merger_hook import MergerHook

if TYPE_CHECKING:
    from vllm.model_executor.models.interns1 import InternS1ProcessingInfo


def image_token(info: InternS1ProcessingInfo) -> int:
    """The id of ``<IMG_CONTEXT>``."""
    token: int = info.get_hf_processor().image_token_id
    return token


class InternVLVision(TiledVision):
    """The vision side of InternVL."""

    _model: InternS1ForConditionalGeneration
    pixels = "pixel_values"
    counts = "image_num_patches"

    @staticmethod
    def tower(model: InternS1ForConditionalGeneration) -> nn.Module:
        """The model's vision tower."""
        tower: nn.Module = model.vision_tower
        return tower

    def tile_tokens(self) -> int:
        """Number of tokens of one square tile, n."""
        return int(self._model.num_image_token)

    def last_attention(self) -> nn.Module:
        """Attention module of the last layer that the model reads."""
        attention: nn.Module = self._model.vision_tower.encoder.layer[-1].attention.attn
        return attention

    def merger_hook(self) -> MergerHook:
        """Hook on the projector, which gets the four patches of a token as one row."""
        projector, patches = self._model.multi_modal_projector, self._model.downsample_ratio**-2
        return MergerHook(projector, round(patches), projector, joined=True)

    def rows(self, tiles: ImageInputs) -> Tensor:
        """Projected rows ``(M, n, D)`` of tiles ``(M, 3, H, W)``, as in the stock model."""
        rows: Tensor = self._model.extract_feature(tiles[self.pixels])
        return rows


class AutopruneInternS1ForConditionalGeneration(PrunedModel, InternS1ForConditionalGeneration):
    """``InternVLForConditionalGeneration`` with K of N visual tokens where a state is served."""

    _processor_factory = make_pruned_factories(
        InternS1ForConditionalGeneration._processor_factory,
        Placeholders(
            count_image_tokens,
            count_largest_image_tokens,
            image_token,
            BACKBONES["InternVLForConditionalGeneration"].unsplittable,
        ),
    )
    autoprune_vision = InternVLVision
