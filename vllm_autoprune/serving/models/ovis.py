"""Ovis 2.5 and 2.6: the merged tokens of one grid of any size, between two rows of a visual table.

A token is a mixture of the rows of that table. Two more of its rows begin and end an image; the
prompt has placeholders for them too. Videos are left whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.model_executor.models.ovis2_5 import INDICATOR_IDS, Ovis2_5

from vllm_autoprune.serving.api.placeholders import Placeholders, TokenCount
from vllm_autoprune.serving.compat import depends_on
from vllm_autoprune.serving.inputs import IMAGE_GRIDS
from vllm_autoprune.serving.models.grid import GridVision
from vllm_autoprune.serving.models.line import PrunedLine
from vllm_autoprune.serving.models.pruned_model import prune_class
from vllm_autoprune.serving.models.vision import EncoderInputs
from vllm_autoprune.serving.worker.tower_hooks import Merger

if TYPE_CHECKING:
    from vllm.multimodal.parse import ImageSize

    from vllm_autoprune.serving.models.grid import _EncodedCells
    from vllm_autoprune.serving.plan import Ids
    from vllm_autoprune.serving.worker.batch import ModelParts
    from vllm_autoprune.serving.worker.features import Signal


@depends_on("vllm.model_executor.models.ovis2_5:VisualTokenizer", "forward")
@depends_on(
    "vllm.model_executor.models.siglip2navit:Siglip2Encoder",
    "forward",
    "get_window_index",
)
class _OvisVision(GridVision):
    """Vision side of Ovis 2.5, whose tower processes the patches of each token in window order."""

    _model: Ovis2_5
    tower_name = "visual_tokenizer"
    layers = "visual_tokenizer.vit.vision_model.encoder.layers"
    attention_name = "self_attn.attn"
    grids = IMAGE_GRIDS
    joined_images = False

    @property
    def merge(self) -> int:
        """Side, in patches, of the square that becomes one token."""
        return int(self._model.config.vit_config.hidden_stride)

    def find_grids(self, inputs: EncoderInputs) -> Tensor:
        """Number of patches of each image in time, height and width, ``(B, 3)``."""
        grids = inputs[self.grids]
        assert isinstance(grids, Tensor)
        return grids.flatten(0, 1)

    def rows(
        self, pixels: Tensor | Sequence[Tensor], grids: Tensor
    ) -> Sequence[Tensor]:
        """Rows ``(N, D)`` of each image, without those that begin and end it."""
        tokenizer = self._model.visual_tokenizer
        patches = torch.cat([*pixels]).to(tokenizer.dtype)
        tokens = tokenizer(patches, grids.to(patches.device))
        rows: Tensor = self._model.vte(tokens)
        return rows.split([self.count(grid) for grid in grids])

    def find_attention(self) -> Any:
        """Attention of the last layer in which every patch of an image sees every other."""
        encoder = self._model.visual_tokenizer.vit.vision_model.encoder
        last = max(encoder.fullatt_block_indexes or [len(encoder.layers) - 1])
        return encoder.layers[last].self_attn.attn

    def find_merger(self) -> Merger:
        """The head's first layer, which takes the patches of a token as one row."""
        layer = self._model.visual_tokenizer.head[0]
        return Merger(layer, self.merge**2, layer, joined=True)

    def _take_signals(
        self, grids: Tensor, lengths: Sequence[int], encoded: _EncodedCells
    ) -> dict[Signal, Tensor]:
        """As the base class; only the attention is in the order of windows."""
        signals = super()._take_signals(grids, lengths, encoded)
        if "cls_attention" in signals:
            encoder = self._model.visual_tokenizer.vit.vision_model.encoder
            window_index, _ = encoder.get_window_index(grids)
            order = window_index.argsort().to(self.sample_weight.device)
            signals["cls_attention"] = signals["cls_attention"][order]
        return signals

    def model_parts(self) -> ModelParts:
        """Parts of the model that policies read, with the rows that stand around an image."""
        return replace(super().model_parts(), embed_marks=self._embed_marks)

    def _embed_marks(self, ids: Tensor) -> Tensor:
        """Rows ``(T, D)`` of the visual table; ids of a client may be beyond it."""
        table = self._model.vte
        rows: Tensor = table(ids.clamp(max=len(table.weight) - 1))
        return rows


@depends_on(
    "vllm.model_executor.models.ovis2_5:Ovis2_5ProcessingInfo", "get_hf_processor"
)
@depends_on(
    "vllm.transformers_utils.processors.ovis2_5:Ovis2_5Processor",
    "construct_visual_indicators",
    "construct_visual_placeholders",
    "get_token_value",
    "preprocess_multidata",
    "smart_resize",
)
def _count(info: Any, size: ImageSize, kwargs: Mapping[str, object]) -> TokenCount:
    """Number of merged tokens of an image, resized as ``preprocess_multidata`` resizes it."""
    processor = info.get_hf_processor()
    unit = processor.patch_size * processor.hidden_stride
    # A request's min_pixels and max_pixels do not reach the processor: transformers drops them.
    height, width = processor.smart_resize(size.height, size.width, factor=unit)
    return TokenCount(height // unit * (width // unit))


def _find_marks(info: Any) -> Ids:
    """Rows of the visual table that begin and end an image."""
    start, _, end = info.get_hf_processor().construct_visual_indicators((1, 1, 1))
    offset = info.get_hf_config().visual_vocab_size - len(INDICATOR_IDS)
    return tuple(offset + token - INDICATOR_IDS[0] for token in (start, end))


AutopruneOvis2_5 = prune_class(
    Ovis2_5,
    Placeholders(
        _count,
        lambda info: _count(info, info.get_image_size_with_most_features(), {}),
        lambda info: info.get_hf_processor().get_token_value("image_token"),
        marks=_find_marks,
    ),
    _OvisVision,
    PrunedLine,
    methods=(),
)
