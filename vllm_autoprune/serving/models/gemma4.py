"""Gemma 4: an image of any aspect ratio is one grid, whose patches are pooled nine to one.

Videos and audio are served as in stock vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.gemma4.modeling_gemma4 import apply_multidimensional_rope
from vllm.model_executor.models.gemma4_mm import (
    _SUPPORTED_SOFT_TOKENS,
    Gemma4ForConditionalGeneration,
    _get_max_soft_tokens,
)

from vllm_autoprune.serving.api.placeholders import Placeholders, TokenCount
from vllm_autoprune.serving.compat import depends_on
from vllm_autoprune.serving.inputs import PATCH_PLACES
from vllm_autoprune.serving.models.line import PrunedLine
from vllm_autoprune.serving.models.pruned_model import prune_class
from vllm_autoprune.serving.models.vision import (
    EncoderInputs,
    ImageInputs,
    ModelImage,
    Vision,
)
from vllm_autoprune.serving.worker.features import ImageFeatures, Region, Signal
from vllm_autoprune.serving.worker.tower_hooks import InputHook, Merger, QueriesAndKeys
from vllm_autoprune.tpdsl.tokens import Grid

if TYPE_CHECKING:
    from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionAttention
    from vllm.model_executor.models.gemma4_mm import Gemma4ProcessingInfo
    from vllm.multimodal.parse import ImageSize

_FIELDS = ("pixel_values", PATCH_PLACES)


class _Pooler(Merger):
    """``Gemma4VisionPooler``, which averages squares of an image's patches."""

    def split(
        self, hidden_states: Tensor, pixel_position_ids: Tensor, **_: object
    ) -> Tensor:
        """``(n / patches, patches, C)`` of one image's patches ``(1, n, C)``: tokens, then padding.

        ``pixel_position_ids`` ``(1, n, 2)`` are column and row of each patch, -1 for padding.
        """
        side = round(self.patches**0.5)
        columns, rows = pixel_position_ids[0].unbind(dim=1)
        tokens = rows // side * (columns.amax() // side + 1) + columns // side
        order = tokens.where(columns >= 0, len(tokens)).argsort(stable=True)
        return hidden_states[0, order].unflatten(0, (-1, self.patches))


def _read_attention(
    attention: Gemma4VisionAttention,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    position_ids: Tensor,
    **_: object,
) -> QueriesAndKeys:
    """Queries and keys of one layer, computed as ``Gemma4VisionAttention.forward`` does."""
    shape = (*hidden_states.shape[:-1], -1, attention.head_dim)
    query, key = (
        apply_multidimensional_rope(
            norm(project(hidden_states).view(shape)), *position_embeddings, position_ids
        )
        for project, norm in (
            (attention.q_proj, attention.q_norm),
            (attention.k_proj, attention.k_norm),
        )
    )
    key = key.repeat_interleave(attention.num_key_value_groups, dim=2)
    return QueriesAndKeys(query, key, attention.scaling)


class _Gemma4Vision(Vision):
    """The vision side of Gemma 4, whose tower is transformers'."""

    _model: Gemma4ForConditionalGeneration
    layers = "vision_tower.encoder.layers"
    attention_name = "self_attn"

    @property
    def _side(self) -> int:
        """Side, in patches, of the square that becomes one token."""
        side: int = self._model.config.vision_config.pooling_kernel_size
        return side

    def hook_attention(self) -> InputHook[QueriesAndKeys]:
        """Hook on the last layer: transformers has no module that takes queries and keys."""
        attention = self.find_attention()
        return InputHook(attention, partial(_read_attention, attention))

    def find_merger(self) -> Merger:
        """The pooler, which is called once for each image."""
        pooler = self._model.vision_tower.pooler
        return _Pooler(pooler, self._side**2, pooler)

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images of one call of ``embed_multimodal``."""
        self._model._parse_and_validate_image_input(**inputs)
        pixels, places = (inputs[name] for name in _FIELDS)
        # Columns and rows of all images, in one copy to the host; the stock model waits for it as
        # well.
        last = torch.stack([image.amax(dim=0) for image in places]).tolist()
        images = []
        for i, (column, row) in enumerate(last):
            height = row // self._side + 1
            width = column // self._side + 1
            grid = torch.tensor([height, width])
            fields = {
                "pixel_values": pixels[i],
                PATCH_PLACES: places[i],
                "grid": grid,
            }
            images.append(ModelImage(fields, height * width))
        return images

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images; images padded to the same number of patches share a call of the tower."""
        fields: dict[str, Any] = {
            name: [image[name] for image in images] for name in _FIELDS
        }
        with self.recording():
            rows = self._model._process_image_input(fields)
        signals: dict[Signal, list[Tensor]] = {
            signal: hook.take_each() for signal, hook in self.merger.items()
        }
        if self.attention is not None:
            signals["cls_attention"] = self._take_attention(images)
        features = []
        for i, image in enumerate(images):
            grid = Grid(*image["grid"].tolist())
            of_image: dict[Signal, Tensor] = {
                signal: parts[i][: grid.tokens].clone()
                for signal, parts in signals.items()
            }
            features.append(ImageFeatures((Region(grid, rows[i].clone(), of_image),)))
        return features

    def _take_attention(self, images: Sequence[ImageInputs]) -> list[Tensor]:
        """Attention ``(N,)`` that each token receives: the mean over its patches."""
        assert self.attention is not None
        # The stock model encodes images of one size together, in the order of their first images.
        sizes = [len(image["pixel_values"]) for image in images]
        order = sorted(range(len(images)), key=lambda i: sizes.index(sizes[i]))
        calls = self.attention.take_each()
        pairs = [
            pair for call in calls for pair in zip(call.query, call.key, strict=True)
        ]
        received = dict[int, Tensor]()
        for i, pair in zip(order, pairs, strict=True):
            height, width = (images[i]["grid"] * self._side).tolist()
            query, key = (
                part[None, : height * width] for part in pair
            )  # without padding
            (patches,) = QueriesAndKeys(query, key, calls[0].scale).received()
            square = patches.view(1, height, width)
            received[i] = functional.avg_pool2d(square, self._side).flatten()
        return [received[i] for i in range(len(images))]


@depends_on(
    "vllm.model_executor.models.gemma4_mm:Gemma4ProcessingInfo",
    "_compute_num_soft_tokens",
)
def _count(
    info: Gemma4ProcessingInfo, size: ImageSize, kwargs: Mapping[str, object]
) -> TokenCount:
    """Count tokens as ``Gemma4MultiModalProcessor._get_prompt_updates`` counts placeholders."""
    maximum, _ = _get_max_soft_tokens(info.ctx.get_merged_mm_kwargs(kwargs))
    if not isinstance(maximum, int) or maximum not in _SUPPORTED_SOFT_TOKENS:
        maximum = None
    return TokenCount(info._compute_num_soft_tokens(size.width, size.height, maximum))


AutopruneGemma4ForConditionalGeneration = prune_class(
    Gemma4ForConditionalGeneration,
    Placeholders(
        _count,
        lambda info: TokenCount(info.get_mm_max_tokens_per_item(0, {})["image"]),
        lambda info: info.get_hf_config().image_token_id,
    ),
    _Gemma4Vision,
    PrunedLine,
    methods=("_parse_and_validate_image_input", "_process_image_input"),
)
