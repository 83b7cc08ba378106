"""Gemma 3, InternVL, Idefics3 and SmolVLM: an image is a number of equal square tiles.

Videos are left as they are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import isqrt
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.model_executor.models.gemma3_mm import Gemma3ForConditionalGeneration
from vllm.model_executor.models.idefics3 import Idefics3ForConditionalGeneration
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.interns1 import InternS1ForConditionalGeneration
from vllm.model_executor.models.smolvlm import SmolVLMForConditionalGeneration

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
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.serving.worker.features import ImageFeatures
from vllm_autoprune.serving.worker.tower_hooks import AttentionHook, MergerHook
from vllm_autoprune.tpdsl.tokens import Grid

if TYPE_CHECKING:
    from vllm.multimodal.parse import ImageSize

# Vision side of models whose image is a number of equal tiles of placeholders.


def _placeholders(
    architecture: str,
    tile_tokens: Callable[[Any], int],
    image_token: Callable[[Any], int],
    largest: Callable[[Any], ImageSize] = lambda info: info.get_image_size_with_most_features(),
    rest_at: int = 0,
) -> Placeholders:
    """Placeholders of a model whose tiles have equally many tokens, the whole image among them.

    ``tile_tokens`` is their number by the model's processor, ``image_token`` the placeholder's id
    and ``largest`` the image size that has most tokens, both by its processing info.
    """

    def count(info: Any, size: ImageSize, kwargs: Mapping[str, object]) -> TokenCount:
        processor = info.get_hf_processor(**kwargs)
        tokens = info.get_num_image_tokens(
            image_width=size.width, image_height=size.height, processor=processor, mm_kwargs=kwargs
        )
        return TokenCount(tokens, tokens // tile_tokens(processor))

    return Placeholders(
        count,
        lambda info: count(info, largest(info), {}),
        image_token,
        BACKBONES[architecture].unsplittable,
        rest_at=rest_at,
    )


class _TiledVision(Vision):
    """Vision side whose images' tiles come in one tensor."""

    pixels: ClassVar[str]
    """The field of tiles ``(M, 3, H, W)``."""
    masks: ClassVar[str] = ""
    """The field of masks of the tiles' pixels ``(M, H, W)``; empty where there is none."""
    counts: ClassVar[str]
    """The field that says how many of them each image has ``(B,)``, on the CPU."""
    apart: ClassVar[bool] = False
    """Whether text stands between the tiles of an image: tokens are then chosen tile by tile."""
    rest_at: ClassVar[int] = 0
    """Number of the tile that then takes what does not divide, as in ``Placeholders.rest_at``."""

    def __init__(self, model: SupportsMultiModal, served: ServedState) -> None:
        super().__init__(model, served)
        self.side = isqrt(self.tile_tokens())
        if "cls_attention" in self.needs:
            self.attention_hook = AttentionHook(self.last_attention())
        if not self.needs.isdisjoint({"encoder", "merger_input"}):
            self.merger_hook = self.make_merger_hook()

    @abstractmethod
    def tile_tokens(self) -> int:
        """Number of tokens of one square tile, n."""

    @abstractmethod
    def last_attention(self) -> nn.Module:
        """Attention module of the last layer that the model reads."""

    def make_merger_hook(self) -> MergerHook | None:
        """Hook on the patch merger; None where the model has none."""
        return None

    @abstractmethod
    def rows(self, tiles: ImageInputs) -> Tensor:
        """Projected rows ``(M, n, D)`` of tiles ``(M, 3, H, W)``, as in the stock model."""

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images of one call of ``embed_multimodal``."""
        counts = inputs[self.counts]
        assert isinstance(counts, Tensor)
        fields = []
        for name in self._tile_fields:
            tiles = inputs[name]
            assert isinstance(tiles, Tensor)
            fields.append(tiles.split(counts.tolist()))
        return [
            ModelImage(dict(zip(self._tile_fields, parts, strict=True)), len(parts[0]) * self.size)
            for parts in zip(*fields, strict=True)
        ]

    @property
    def size(self) -> int:
        """Number of tokens of one tile, n."""
        return self.side**2

    @property
    def _tile_fields(self) -> tuple[str, ...]:
        return (self.pixels, self.masks) if self.masks else (self.pixels,)

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images in one pass of the vision tower."""
        counts = [len(image[self.pixels]) for image in images]
        tiles = {name: torch.cat([image[name] for image in images]) for name in self._tile_fields}
        with self.recording():
            rows = self.rows(tiles)
        signals = {
            signal: part.unflatten(0, (-1, self.size))
            for signal, part in self.take_merger_input().items()
        }
        if self.attention_hook is not None:
            signals["cls_attention"] = self._pool(self.attention_hook.take())
        features, start = [], 0
        for count in counts:
            regions = []
            for run in [1] * count if self.apart else [count]:
                part, grid = slice(start, start + run), Grid(self.side, self.side, run)
                of_region = {
                    name: tiles[part].flatten(0, 1).clone() for name, tiles in signals.items()
                }
                tokens = rows[part].flatten(0, 1).clone()
                regions.append(self.region(grid, tokens, of_region, share=run))
                start += run
            features.append(ImageFeatures(tuple(regions), rest_at=self.rest_at))
        return features

    def _pool(self, received: Sequence[Tensor]) -> Tensor:
        """``(M, n)``: attention of patches, the mean of those that one token is made of."""
        patches = torch.stack(list(received))
        across = isqrt(patches.shape[1])
        # Some towers have a [CLS] token before their patches, which no model here reads.
        square = patches[:, -across * across :].view(-1, across, across)
        return functional.avg_pool2d(square, across // self.side).flatten(1)


# Gemma 3: one pooled square of tokens an image, and one for each crop of pan-and-scan.


class _Gemma3Vision(_TiledVision):
    """The vision side of Gemma 3."""

    _model: Gemma3ForConditionalGeneration
    pixels = "pixel_values"
    counts = "num_patches"
    apart = True

    def tile_tokens(self) -> int:
        """Number of tokens of one square tile, n."""
        return int(self._model.config.mm_tokens_per_image)

    def last_attention(self) -> nn.Module:
        """Attention module of the last layer that the model reads."""
        layers = self._model.vision_tower.vision_model.encoder.layers
        attention: nn.Module = layers[-1].self_attn.attn
        return attention

    def rows(self, tiles: ImageInputs) -> Tensor:
        """Projected rows ``(M, n, D)`` of tiles ``(M, 3, H, W)``, as in the stock model."""
        model, pixels = self._model, tiles[self.pixels]
        if self.graphs is not None:
            each = torch.ones(len(pixels), dtype=torch.int64)
            return torch.stack(list(self.graphs({self.pixels: pixels, self.counts: each})))
        features = model._image_pixels_to_features(model.vision_tower, pixels)
        rows: Tensor = model.multi_modal_projector(features)
        return rows


# InternVL of transformers: crops and a thumbnail, each a pixel-shuffled square of tokens.
#
# Videos are left as they are.


class _InternVLVision(_TiledVision):
    """The vision side of InternVL."""

    _model: InternS1ForConditionalGeneration
    pixels = "pixel_values"
    counts = "image_num_patches"

    def tile_tokens(self) -> int:
        """Number of tokens of one square tile, n."""
        return int(self._model.num_image_token)

    def last_attention(self) -> nn.Module:
        """Attention module of the last layer that the model reads."""
        attention: nn.Module = self._model.vision_tower.encoder.layer[-1].attention.attn
        return attention

    def make_merger_hook(self) -> MergerHook:
        """Hook on the projector, which gets the four patches of a token as one row."""
        projector, patches = self._model.multi_modal_projector, self._model.downsample_ratio**-2
        return MergerHook(projector, round(patches), projector, joined=True)

    def rows(self, tiles: ImageInputs) -> Tensor:
        """Projected rows ``(M, n, D)`` of tiles ``(M, 3, H, W)``, as in the stock model."""
        rows: Tensor = self._model.extract_feature(tiles[self.pixels])
        return rows


# Idefics3 and SmolVLM: tiles and the whole image, each a pixel-shuffled square behind its name.


_WHOLE = -1
"""The tile that shows the whole image."""


@depends_on(
    "vllm.model_executor.models.idefics3:Idefics3Model",
    "image_pixels_to_features",
    only="Idefics3ForConditionalGeneration",
)
class _Idefics3Vision(_TiledVision):
    """The vision side of Idefics3 and SmolVLM, which vLLM serves with the same model."""

    _model: Idefics3ForConditionalGeneration
    tower_name = "model.vision_model"
    pixels = "pixel_values"
    masks = "pixel_attention_mask"
    counts = "num_patches"
    apart = True
    rest_at = _WHOLE

    def tile_tokens(self) -> int:
        """Number of tokens of one square tile, n."""
        return int(self._model.model.image_seq_len)

    def last_attention(self) -> nn.Module:
        """Attention module of the last layer that the model reads."""
        attention: nn.Module = self._model.model.vision_model.encoder.layers[-1].self_attn.attn
        return attention

    def make_merger_hook(self) -> MergerHook:
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


def _largest_idefics3(info: Any) -> ImageSize:
    """A square: every image is enlarged until it is cut into tiles."""
    from vllm.multimodal.parse import ImageSize

    edge = info.get_hf_processor().image_processor.max_image_size["longest_edge"]
    return ImageSize(edge, edge)


_GEMMA3_PLACEHOLDERS = _placeholders(
    "Gemma3ForConditionalGeneration",
    lambda processor: processor.image_seq_length,
    lambda info: info.get_hf_config().image_token_index,
)
_INTERNVL_PLACEHOLDERS = _placeholders(
    "InternVLForConditionalGeneration",
    lambda processor: processor.image_seq_length,
    lambda info: info.get_hf_processor().image_token_id,
)
IDEFICS3_PLACEHOLDERS = _placeholders(
    "Idefics3ForConditionalGeneration",
    lambda processor: processor.image_seq_len,
    lambda info: info.get_hf_processor().image_token_id,
    _largest_idefics3,
    rest_at=_WHOLE,
)

AutopruneGemma3ForConditionalGeneration = prune_class(
    Gemma3ForConditionalGeneration,
    _GEMMA3_PLACEHOLDERS,
    _Gemma3Vision,
    methods=("_image_pixels_to_features",),
)
AutopruneInternS1ForConditionalGeneration = prune_class(
    InternS1ForConditionalGeneration,
    _INTERNVL_PLACEHOLDERS,
    _InternVLVision,
    methods=("extract_feature",),
    merger="InternS1MultiModalProjector",
)
AutopruneIdefics3ForConditionalGeneration = prune_class(
    Idefics3ForConditionalGeneration,
    IDEFICS3_PLACEHOLDERS,
    _Idefics3Vision,
    methods=(),
    merger="idefics3.Idefics3SimpleMLP",
)
AutopruneSmolVLMForConditionalGeneration = prune_class(
    SmolVLMForConditionalGeneration,
    IDEFICS3_PLACEHOLDERS,
    _Idefics3Vision,
    methods=(),
    merger="idefics3.Idefics3SimpleMLP",
)
