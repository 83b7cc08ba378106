"""LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision: one tile, or tiles of any resolution."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isqrt
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.models.llava_next.modeling_llava_next import (
    get_anyres_image_grid_shape,
)
from vllm.model_executor.models.llava import LlavaForConditionalGeneration
from vllm.model_executor.models.llava_next import LlavaNextForConditionalGeneration
from vllm.model_executor.models.llava_onevision import (
    LlavaOnevisionForConditionalGeneration,
)

from vllm_autoprune.serving.api.placeholders import Placeholders, TokenCount
from vllm_autoprune.serving.api.positions import ItemFields, ItemSize
from vllm_autoprune.serving.inputs import VIDEO_PIXELS
from vllm_autoprune.serving.models import pooled_frame
from vllm_autoprune.serving.models.line import PrunedLine
from vllm_autoprune.serving.models.pruned_model import prune_class
from vllm_autoprune.serving.models.vision import (
    EncoderInputs,
    ImageInputs,
    ModelImage,
    Vision,
)
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.serving.worker.batch import ModelParts
from vllm_autoprune.serving.worker.features import (
    ImageFeatures,
    Region,
    Signal,
    Signals,
)
from vllm_autoprune.serving.worker.question import LlamaPrefix
from vllm_autoprune.serving.worker.tower_hooks import NextTowerLayer
from vllm_autoprune.tpdsl.tokens import Grid

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces import MultiModalEmbeddings
    from vllm.model_executor.models.llava_next import (
        LlavaNextLikeConfig,
        LlavaNextProcessingInfo,
    )
    from vllm.multimodal.parse import ImageSize

_Tiles = tuple[Tensor, Signals]
"""Projected tokens ``(M, n, D)`` of M tiles of n tokens each, and their signals."""


def _split_by_image(inputs: EncoderInputs, *names: str) -> list[dict[str, Tensor]]:
    """The named fields of each image, as one mapping per image.

    Each field holds one entry per image, in a stacked tensor or in a list.
    """
    entries = zip(*(inputs[name] for name in names), strict=True)
    return [dict(zip(names, parts, strict=True)) for parts in entries]


_LAYERS = "vision_tower.vision_model.encoder.layers"
"""The layers up to the one that the model reads: vLLM builds no more (all but the last of
LLaVA-1.5's)."""


class _ClipVision(Vision):
    """Vision side with a CLIP tower, which has [CLS] and every layer that policies read."""

    _model: LlavaForConditionalGeneration
    layers = _LAYERS

    def __init__(
        self, model: LlavaForConditionalGeneration, served: ServedState
    ) -> None:
        super().__init__(model, served)
        config = model.config.vision_config
        side = config.image_size // config.patch_size
        self.grid = Grid(side, side)
        layers = len(model.vision_tower.vision_model.encoder.layers)
        self._next = (
            NextTowerLayer(config, layers) if "next_layer" in self.needs else None
        )

    def _project(self, rows: Tensor) -> Tensor:
        """Project rows of the vision tower, ``(..., Dv) -> (..., D)``, by the model's projector."""
        projected: Tensor = self._model.multi_modal_projector(
            rows.to(self.sample_weight.dtype)
        )
        return projected

    def model_parts(self) -> ModelParts:
        """Parts of the model that policies read, with projector and first language layers."""
        parts = super().model_parts()
        language = None
        if "language" in self.needs:
            start = (self._model.config.text_config.bos_token_id,)
            language = partial(LlamaPrefix, self._model.language_model.model, start)
        return replace(parts, project=self._project, language=language)

    def capture_weights(
        self, weights: Iterable[tuple[str, Tensor]]
    ) -> Iterable[tuple[str, Tensor]]:
        """As the base class; also copy the next layer, which the model itself leaves out."""
        if self._next is None:
            return weights
        return self._next.capture_weights(weights, self.sample_weight)

    def finish_loading(self) -> None:
        """Finish loading, and require the weights of the next layer if the state reads it."""
        super().finish_loading()
        if self._next is not None:
            self._next.require_weights()

    def encode_tiles(self, pixels: Tensor) -> _Tiles:
        """Projected tokens and signals of tiles ``(M, 3, H, W)``, in one pass of the tower."""
        relevance = self.load_relevance()
        signals = dict[Signal, Tensor]()
        with self.recording():
            states = self._model.vision_tower(pixels)
        hidden = states[:, 1:]
        patches = None if relevance is None else relevance.patches(hidden)
        if patches is not None:
            signals["relevance"] = patches
        layer = None if self.attention is None else self.attention.take()
        if layer is not None and "cls_attention" in self.needs:
            signals["cls_attention"] = layer.cls_attention()
        reads_tower = not self.needs.isdisjoint({"tower", "next_layer"})
        if reads_tower or "encoder" in self.needs:
            signals["encoder"] = hidden
        if layer is not None and reads_tower:
            signals |= {"tower_cls": states[:, :1], "tower_keys": layer.mean_keys()}
        if self._next is not None:
            self._next.init_dummy_weights(self.sample_weight)
            signals["next_attention"], signals["next_keys"] = self._next(states)
        return self._model.multi_modal_projector(hidden), signals


class LlavaVision(_ClipVision):
    """The vision side of LLaVA-1.5: one tile an image, with its tokens in raster order."""

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images of one call of ``embed_multimodal``."""
        self._model._parse_and_validate_image_input(**inputs)
        split = _split_by_image(inputs, "pixel_values")
        return [ModelImage(image, self.grid.tokens) for image in split]

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images in one pass of the vision tower."""
        pixels = torch.stack([image["pixel_values"] for image in images])
        projected, signals = self.encode_tiles(pixels)
        features = []
        for i in range(len(images)):
            # Copied, because a view would keep the whole batch alive in the cache.
            of_image: Signals = {
                signal: part[i].clone() for signal, part in signals.items()
            }
            region = Region(self.grid, projected[i].clone(), of_image)
            features.append(ImageFeatures((region,)))
        return features


# Any-resolution images: a base view, then crops stitched into one map with a newline per row.
#
# The model's own code joins the crops. Marked tiles are sent through it to find out where each row
# comes from, so that padding is cut off and rows are counted exactly as in the model.


class _RegionLayout(NamedTuple):
    """Layout of one region of the joined rows; see :class:`Region`."""

    grid: Grid
    """Layout of the tokens."""
    order: Tensor
    """``(N,)``: the index of each token among the joined rows."""
    share: int
    """Number of vision-tower tiles that the region came from."""


class _JoinedVision(Vision):
    """Vision side of models that join the tiles of an image."""

    _model: LlavaNextForConditionalGeneration | LlavaOnevisionForConditionalGeneration

    @abstractmethod
    def encode_tiles(self, pixels: Tensor) -> _Tiles:
        """Projected tokens and signals of tiles ``(M, 3, H, W)``, in one pass of the tower."""

    @abstractmethod
    def merge(self, model: Any, size: Any, tiles: Tensor, newline: Tensor) -> Tensor:
        """Join the tiles of one image by the model's own code, called with ``model`` as self."""

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images of one call of ``embed_multimodal``."""
        self._model._parse_and_validate_image_input(**inputs)
        images = []
        for image in _split_by_image(inputs, "pixel_values", "image_sizes"):
            regions, newlines = self._compute_layout(image)
            tokens = sum(region.grid.tokens for region in regions)
            images.append(ModelImage(image, tokens + newlines))
        return images

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images: all their tiles go through the vision tower in one pass."""
        projected, signals = self.encode_tiles(
            torch.cat([i["pixel_values"] for i in images])
        )
        newline = self._model.image_newline
        features = []
        start = 0
        for image in images:
            tiles = slice(start, start + len(image["pixel_values"]))
            start = tiles.stop
            rows = self._join(image, projected[tiles], newline)
            # The signals of tokens are joined in the same way as the tokens.
            joined: dict[Signal, Tensor] = {}
            for signal, part in signals.items():
                if signal != "tower_cls":
                    wide = part[tiles] if part.dim() > 2 else part[tiles][:, :, None]
                    ends = wide.new_zeros(wide.shape[2])
                    joined[signal] = self._join(image, wide, ends).reshape(
                        -1, *part.shape[2:]
                    )
            layout, newlines = self._compute_layout(image)
            regions = []
            tile = tiles.start
            for grid, positions, share in layout:
                order = positions.to(rows.device, non_blocking=True)
                of_region: dict[Signal, Tensor] = {
                    s: part[order] for s, part in joined.items()
                }
                if "tower_cls" in signals:
                    cls = signals["tower_cls"][tile : tile + share, 0]
                    # Crops that form one grid share one [CLS].
                    alone = grid.tiles == share
                    of_region["tower_cls"] = (
                        cls.clone() if alone else cls.mean(0, keepdim=True)
                    )
                tile += share
                region = Region(grid, rows[order], of_region, order=order, share=share)
                regions.append(region)
            features.append(ImageFeatures(tuple(regions), newline, newlines))
        return features

    def _join(self, image: ImageInputs, tiles: Tensor, newline: Tensor) -> Tensor:
        """Join tiles ``(T, n, C)`` and a newline ``(C,)`` to the rows ``(R, C)`` of the model."""
        # No other part of the model is read, so its code can be called with marked tiles.
        model = SimpleNamespace(config=self._model.config, image_newline=newline)
        return self.merge(model, image["image_sizes"], tiles, newline)

    def _compute_layout(self, image: ImageInputs) -> tuple[list[_RegionLayout], int]:
        """Regions of the rows that the model makes of an image, and the number of newlines.

        If no padding was cut off, base view and crops are the T equal tiles over which published
        policies split a budget. Otherwise the crops are one region of the remaining shape, whose
        share of a budget is that of the tiles it came from. The layout follows from the image's
        size: an image that was processed beside a larger one also has blank tiles, which go through
        the tower, as in the stock model, and are left out when tiles are joined.
        """
        vision = self._model.config.vision_config
        side = vision.image_size // vision.patch_size
        square = Grid(side, side)
        size = side * side
        tiles = _count_tiles(self._model.config, *image["image_sizes"].tolist())
        marks = self._join(image, torch.zeros(tiles, size, 1), -torch.ones(1))[:, 0]
        newlines = int((marks < 0).sum())
        height = newlines
        width = (len(marks) - size) // newlines - 1 if newlines else 0
        base = torch.arange(size)
        if width < 1:
            return [_RegionLayout(square, base, 1)], newlines
        rows = size + torch.arange(height)[:, None] * (width + 1) + torch.arange(width)
        if (
            height * width == (tiles - 1) * size
            and height % side == 0
            and width % side == 0
        ):
            crops = rows.view(height // side, side, width // side, side).transpose(1, 2)
            order = torch.cat([base, crops.flatten()])
            return [_RegionLayout(Grid(side, side, tiles), order, tiles)], newlines
        crop = _RegionLayout(Grid(height, width), rows.flatten(), tiles - 1)
        return [_RegionLayout(square, base, 1), crop], newlines


def _count_tiles(config: LlavaNextLikeConfig, height: int, width: int) -> int:
    """Number of tiles of an image of this size: the base view and its crops."""
    rows, columns = get_anyres_image_grid_shape(
        (height, width), config.image_grid_pinpoints, config.vision_config.image_size
    )
    return 1 + int(rows * columns)


class _LlavaNextVision(_ClipVision, _JoinedVision):
    """The vision side of LLaVA-NeXT."""

    def merge(self, model: Any, size: Any, tiles: Tensor, newline: Tensor) -> Tensor:
        """Join the tiles of one image."""
        join = LlavaNextForConditionalGeneration._merge_image_patch_embeddings
        rows: Tensor = join(model, size, tiles, strategy="spatial_unpad")
        return rows


class _OnevisionVision(_JoinedVision):
    """The vision side of LLaVA-OneVision: a SigLIP tower; many crops are shrunk.

    Frames of a video are pooled, and a newline follows the last frame.
    """

    _model: LlavaOnevisionForConditionalGeneration
    layers = _LAYERS

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images or videos of one call of ``embed_multimodal``."""
        if VIDEO_PIXELS not in inputs:
            return super().images(inputs)
        self._model._parse_and_validate_video_input(**inputs)
        per_frame, ends = pooled_frame(self._model.config)
        videos = []
        for video in _split_by_image(inputs, VIDEO_PIXELS):
            tokens = len(video[VIDEO_PIXELS]) * per_frame + ends
            videos.append(ModelImage(video, tokens))
        return videos

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images or videos in one pass of the vision tower."""
        if VIDEO_PIXELS not in images[0]:
            return super().encode(images)
        model = self._model
        frames = [len(video[VIDEO_PIXELS]) for video in images]
        with self.recording():
            pixels = torch.cat([video[VIDEO_PIXELS] for video in images])
            pooled = model._video_pixels_to_features(model.vision_tower, pixels)
        signals = dict[Signal, Sequence[Tensor]]()
        if self.attention is not None:
            received = torch.stack(self.attention.take().received())
            signals["cls_attention"] = model.apply_pooling(received[:, :, None]).split(
                frames
            )
        side = isqrt(pooled.shape[1])
        features = []
        for i, rows in enumerate(pooled.split(frames)):
            grid = Grid(side, side, frames[i], video=True)
            of_video: Signals = {
                s: part[i].flatten().clone() for s, part in signals.items()
            }
            order = torch.arange(grid.tokens, device=rows.device)
            region = Region(grid, rows.flatten(0, 1).clone(), of_video, order=order)
            features.append(ImageFeatures((region,), model.image_newline, 1))
        return features

    def encode_tiles(self, pixels: Tensor) -> _Tiles:
        """Projected tokens and signals of tiles ``(M, 3, H, W)``, in one pass of the tower."""
        with self.recording():
            hidden = self._model._image_pixels_to_features(
                self._model.vision_tower, pixels
            )
        signals = dict[Signal, Tensor]()
        if self.attention is not None:
            signals["cls_attention"] = torch.stack(self.attention.take().received())
        return self._model.multi_modal_projector(hidden), signals

    def merge(self, model: Any, size: Any, tiles: Tensor, newline: Tensor) -> Tensor:
        """Join the tiles of one image."""
        join = LlavaOnevisionForConditionalGeneration._merge_image_patch_embeddings
        strategy = "spatial_unpad"
        rows: Tensor = join(
            model, size, tiles, image_newline=newline, strategy=strategy
        )
        return rows


class _PrunedOnevision(PrunedLine):
    """LLaVA-OneVision, which also serves videos of different lengths in one call.

    Why: in that case stock returns rows as ``(1, N, D)``, which makes vLLM's runner end the engine.
    Remove when: ``_process_video_pixels`` gives ``(N, D)``.
    """

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Rows ``(K_i, D)`` of every image or video."""
        return [rows.flatten(0, -2) for rows in super().embed_multimodal(**kwargs)]


def _count_joined_tokens(
    info: LlavaNextProcessingInfo, size: ImageSize, kwargs: Mapping[str, object]
) -> TokenCount:
    """Count base view, unpadded crops and their newlines; tiles are the base view and the crops."""
    tokens = info.get_num_image_tokens(image_width=size.width, image_height=size.height)
    return TokenCount(
        tokens, _count_tiles(info.get_hf_config(), size.height, size.width)
    )


def _measure(info: LlavaNextProcessingInfo, item: ItemFields) -> ItemSize:
    """Size of a processed video: its number of frames."""
    return ItemSize(frames=len(item[VIDEO_PIXELS].data) if VIDEO_PIXELS in item else 0)


_PLACEHOLDERS = Placeholders(
    # Every image is one tile.
    lambda info, size, kwargs: TokenCount(info.get_max_image_tokens()),
    lambda info: TokenCount(info.get_max_image_tokens()),
    lambda info: info.get_hf_config().image_token_index,
)
_JOINED_PLACEHOLDERS = Placeholders(
    _count_joined_tokens,
    lambda info: _count_joined_tokens(
        info, info.get_image_size_with_most_features(), {}
    ),
    lambda info: info.get_hf_config().image_token_index,
)

_INPUT = "_parse_and_validate_image_input"
_MERGE = "_merge_image_patch_embeddings"

AutopruneLlavaForConditionalGeneration = prune_class(
    LlavaForConditionalGeneration, _PLACEHOLDERS, LlavaVision, PrunedLine
)
AutopruneLlavaNextForConditionalGeneration = prune_class(
    LlavaNextForConditionalGeneration,
    _JOINED_PLACEHOLDERS,
    _LlavaNextVision,
    PrunedLine,
    methods=(_INPUT, _MERGE),
)
AutopruneLlavaOnevisionForConditionalGeneration = prune_class(
    LlavaOnevisionForConditionalGeneration,
    replace(
        _JOINED_PLACEHOLDERS,
        video_token=lambda info: info.get_hf_config().video_token_index,
        measure=_measure,
    ),
    _OnevisionVision,
    _PrunedOnevision,
    methods=(
        _INPUT,
        "_image_pixels_to_features",
        _MERGE,
        "_parse_and_validate_video_input",
        "_video_pixels_to_features",
        "apply_pooling",
    ),
)
