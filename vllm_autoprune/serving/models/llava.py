"""LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision: one tile, or tiles of any resolution."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape
from vllm.model_executor.models.llava import LlavaForConditionalGeneration
from vllm.model_executor.models.llava_next import LlavaNextForConditionalGeneration
from vllm.model_executor.models.llava_onevision import LlavaOnevisionForConditionalGeneration

from vllm_autoprune.serving.api.layout import Placeholders, TokenCount
from vllm_autoprune.serving.models.pruned_model import (
    EncoderInputs,
    ImageInputs,
    ModelImage,
    Vision,
    prune_class,
    split_by_image,
    stack_field,
)
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.serving.worker.features import (
    ImageFeatures,
    Region,
    Signal,
    Signals,
    map_signals,
)
from vllm_autoprune.serving.worker.question import FirstLanguageLayers
from vllm_autoprune.serving.worker.regions import ModelParts
from vllm_autoprune.serving.worker.tower_hooks import (
    AttentionHook,
    NextTowerLayer,
    QkvHook,
)
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens

if TYPE_CHECKING:
    from vllm.model_executor.models.llava import BaseLlavaProcessingInfo
    from vllm.model_executor.models.llava_next import LlavaNextLikeConfig, LlavaNextProcessingInfo
    from vllm.multimodal.parse import ImageSize

Tiles = tuple[Tensor, Signals]
"""M tiles of n tokens each after the projector ``(M, n, D)``, and their signals."""

# Vision side of LLaVA models with a CLIP tower: [CLS] and every layer that policies read.


class _ClipVision(Vision):
    """Vision side shared by LLaVA-1.5 and LLaVA-NeXT."""

    _model: LlavaForConditionalGeneration

    def __init__(self, model: LlavaForConditionalGeneration, served: ServedState) -> None:
        super().__init__(model, served)
        config = model.config.vision_config
        side = config.image_size // config.patch_size
        self.grid = Grid(side, side)
        layers = model.vision_tower.vision_model.encoder.layers
        inside = not self.needs.isdisjoint({"cls_attention", "tower", "next_layer"})
        self._last = QkvHook(layers[-1].self_attn) if inside else None
        self._next = NextTowerLayer(config, len(layers)) if "next_layer" in self.needs else None
        self._language: FirstLanguageLayers | None = None

    def project(self, rows: Tensor) -> Tensor:
        """Rows of the vision tower ``(..., Dv)`` through the model's projector, ``(..., D)``."""
        projected: Tensor = self._model.multi_modal_projector(rows.to(self.sample_weight.dtype))
        return projected

    def model_parts(self) -> ModelParts:
        """Parts of the model that policies read, with the language model's first layers."""
        if self._language is None and "language" in self.needs:
            start = self._model.config.text_config.bos_token_id
            model = self._model.language_model.model
            self._language = FirstLanguageLayers(model, (start,), self.sample_weight.device)
        language = None if self._language is None else self._language.read
        return ModelParts(self.project, self.relevance(), language, self.word_embedding())

    def capture_weights(
        self, weights: Iterable[tuple[str, Tensor]]
    ) -> Iterable[tuple[str, Tensor]]:
        """Also copy the next layer, which is in the checkpoint and not in the model."""
        return (
            weights
            if self._next is None
            else self._next.capture_weights(weights, self.sample_weight)
        )

    def finish_loading(self) -> None:
        """Finish loading, and require the weights of the next layer where the state reads it."""
        super().finish_loading()
        if self._next is not None:
            self._next.require_weights()

    def encode_tiles(self, pixels: Tensor) -> Tiles:
        """Encode tiles ``(M, 3, H, W)`` in one pass of the vision tower."""
        relevance, signals = self.relevance(), dict[Signal, Tensor]()
        states = self._model.vision_tower(pixels)
        hidden = states[:, 1:]
        patches = None if relevance is None else relevance.patches(hidden)
        if patches is not None:
            signals["relevance"] = patches
        last = None if self._last is None else self._last.take()
        if last is not None and "cls_attention" in self.needs:
            signals["cls_attention"] = last.cls_attention()
        inside = not self.needs.isdisjoint({"tower", "next_layer"})
        if inside or "encoder" in self.needs:
            signals["encoder"] = hidden
        if last is not None and inside:
            signals |= {"tower_cls": states[:, :1], "tower_keys": last.mean_keys()}
        if self._next is not None:
            self._next.init_dummy_weights(self.sample_weight)
            signals["next_attention"], signals["next_keys"] = self._next(states)
        return self._model.multi_modal_projector(hidden), signals


# Any-resolution images: a base view, then crops stitched into one map with a newline a row.
#
# The model's own code joins the crops. The origin of each row is determined by sending marked tiles
# through it, so padding is cut off and rows are counted as the model does.


Join = Callable[[Tensor, Tensor], Tensor]
"""From tiles ``(T, n, C)`` and a newline ``(C,)`` to the rows ``(R, C)`` that the model makes."""

_JoinOf = Callable[[ImageInputs], Join]
"""How the model joins the tiles of one image."""


@dataclass(frozen=True, slots=True)
class _RegionLayout:
    """A region of the joined rows: its layout, and the position ``(N,)`` of each token."""

    grid: Grid
    order: Tensor
    share: int


@dataclass(frozen=True, slots=True)
class _JoinedLayout:
    """Order of an image's rows: the regions, and the number of newlines."""

    places: tuple[_RegionLayout, ...]
    newlines: int


def compute_joined_layout(join: Join, tiles: int, side: int) -> _JoinedLayout:
    """Layout of the rows that the model makes of T tiles of ``side`` x ``side`` tokens.

    Where no padding was cut off, base view and crops are the T equal tiles that published
    policies split a budget over. Otherwise crops are one region of the shape that is left, and
    its share of a budget is that of the tiles it came from.
    """
    size = side * side
    marks = join(torch.zeros(tiles, size, 1), -torch.ones(1))[:, 0]
    newlines = int((marks < 0).sum())
    height = newlines
    width = (len(marks) - size) // newlines - 1 if newlines else 0
    base = torch.arange(size)
    if width < 1:
        return _JoinedLayout((_RegionLayout(Grid(side, side), base, 1),), newlines)
    rows = size + torch.arange(height)[:, None] * (width + 1) + torch.arange(width)
    if height * width == (tiles - 1) * size and height % side == 0 and width % side == 0:
        cut = rows.view(height // side, side, width // side, side).transpose(1, 2)
        order = torch.cat([base, cut.flatten()])
        return _JoinedLayout((_RegionLayout(Grid(side, side, tiles), order, tiles),), newlines)
    base_view = _RegionLayout(Grid(side, side), base, 1)
    return _JoinedLayout(
        (base_view, _RegionLayout(Grid(height, width), rows.flatten(), tiles - 1)), newlines
    )


def _count_tiles(config: LlavaNextLikeConfig, height: int, width: int) -> int:
    """Count the tiles of an image of this size: the base view and its crops."""
    rows, columns = get_anyres_image_grid_shape(
        (height, width), config.image_grid_pinpoints, config.vision_config.image_size
    )
    return 1 + int(rows * columns)


def _compute_layout(image: ImageInputs, join: Join, config: LlavaNextLikeConfig) -> _JoinedLayout:
    """Layout of one image, by its size: processed beside a larger one, it has blank tiles as well.

    Those go through the tower, as in the stock model, and ``join`` leaves them out.
    """
    vision = config.vision_config
    tiles = _count_tiles(config, *image["image_sizes"].tolist())
    return compute_joined_layout(join, tiles, vision.image_size // vision.patch_size)


def split_joined_images(
    inputs: EncoderInputs, join_of: _JoinOf, config: LlavaNextLikeConfig
) -> list[ModelImage]:
    """The images of one call, each with its tiles, its size and its number of rows."""
    images = []
    for image in split_by_image({name: inputs[name] for name in ("pixel_values", "image_sizes")}):
        layout = _compute_layout(image, join_of(image), config)
        tokens = sum(place.grid.tokens for place in layout.places)
        images.append(ModelImage(image, tokens + layout.newlines))
    return images


def join_features(
    tiles: Tiles, image: ImageInputs, join_of: _JoinOf, newline: Tensor, config: LlavaNextLikeConfig
) -> ImageFeatures:
    """Join the T tiles of one image; the signals of its tokens are joined like the tokens."""
    projected, signals = tiles
    join = join_of(image)
    layout = _compute_layout(image, join, config)

    def join_rows(part: Tensor) -> Tensor:
        """Tiles ``(T, n, ...)`` as rows."""
        rows = part if part.dim() == 3 else part[:, :, None]
        return join(rows, rows.new_zeros(rows.shape[2])).reshape(-1, *part.shape[2:])

    rows = join(projected, newline)
    joined = {name: join_rows(part) for name, part in signals.items() if name != "tower_cls"}
    regions, start = [], 0
    for place in layout.places:
        order = place.order.to(rows.device, non_blocking=True)
        of_region: dict[Signal, Tensor] = {name: part[order] for name, part in joined.items()}
        of_region["cosine"] = VisualTokens(rows[order][None], place.grid).cosine[0]
        if "tower_cls" in signals:
            cls = signals["tower_cls"][start : start + place.share, 0]
            # Crops that form one grid share one [CLS].
            alone = place.grid.tiles == place.share
            of_region["tower_cls"] = cls.clone() if alone else cls.mean(dim=0, keepdim=True)
        regions.append(Region(place.grid, rows[order], of_region, order=order, share=place.share))
        start += place.share
    return ImageFeatures(tuple(regions), newline, layout.newlines)


class _JoinedVision(Vision):
    """Vision side of models that join the tiles of an image."""

    _model: LlavaNextForConditionalGeneration | LlavaOnevisionForConditionalGeneration

    @abstractmethod
    def encode_tiles(self, pixels: Tensor) -> Tiles:
        """Encode tiles ``(M, 3, H, W)`` in one pass of the vision tower."""

    @abstractmethod
    def merge(self, model: Any, size: Any, tiles: Tensor, newline: Tensor) -> Tensor:
        """The model's own code that joins the tiles of one image; it reads what ``model`` has."""

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images of one call of ``embed_multimodal``."""
        self._model._parse_and_validate_image_input(**inputs)
        return split_joined_images(inputs, self._join, self._model.config)

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images: all their tiles go through the vision tower in one pass."""
        pixels = [image["pixel_values"] for image in images]
        projected, signals = self.encode_tiles(torch.cat(pixels))
        newline, config = self._model.image_newline, self._model.config
        features, start = [], 0
        for image, tiles in zip(images, pixels, strict=True):
            part = slice(start, start + len(tiles))
            of_image = projected[part], {name: signal[part] for name, signal in signals.items()}
            features.append(join_features(of_image, image, self._join, newline, config))
            start = part.stop
        return features

    def _join(self, image: ImageInputs) -> Join:
        def join(tiles: Tensor, newline: Tensor) -> Tensor:
            # Any other part of the model is not read, so it can be called with marked tiles.
            model = SimpleNamespace(config=self._model.config, image_newline=newline)
            return self.merge(model, image["image_sizes"], tiles, newline)

        return join


# LLaVA-1.5: one tile an image, with its tokens in raster order.


def _count_llava_tokens(
    info: BaseLlavaProcessingInfo, size: ImageSize, kwargs: Mapping[str, object]
) -> TokenCount:
    """Count the tokens of an image, which is one tile."""
    return TokenCount(info.get_num_image_tokens(image_width=size.width, image_height=size.height))


PLACEHOLDERS = Placeholders(
    _count_llava_tokens,
    lambda info: TokenCount(info.get_max_image_tokens()),
    lambda info: info.get_hf_config().image_token_index,
)


class LlavaVision(_ClipVision):
    """The vision side of LLaVA-1.5."""

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images of one call of ``embed_multimodal``."""
        self._model._parse_and_validate_image_input(**inputs)
        pixels = {"pixel_values": inputs["pixel_values"]}
        return [ModelImage(image, self.grid.tokens) for image in split_by_image(pixels)]

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images in one pass of the vision tower."""
        projected, signals = self.encode_tiles(stack_field(images, "pixel_values"))
        features = []
        for i in range(len(images)):
            # Rows are copied: a view would keep the whole batch alive in the cache.
            of_image = map_signals(signals, lambda part, i=i: part[i].clone())  # type: ignore[misc]
            features.append(
                ImageFeatures((self.region(self.grid, projected[i].clone(), of_image),))
            )
        return features


# LLaVA-NeXT: tiles of any resolution through a CLIP tower.


def count_image_tokens(
    info: LlavaNextProcessingInfo, size: ImageSize, kwargs: Mapping[str, object]
) -> TokenCount:
    """Count base view, unpadded crops and their newlines; tiles are the base view and the crops."""
    tokens = info.get_num_image_tokens(image_width=size.width, image_height=size.height)
    return TokenCount(tokens, _count_tiles(info.get_hf_config(), size.height, size.width))


_NEXT_PLACEHOLDERS = Placeholders(
    count_image_tokens,
    lambda info: count_image_tokens(info, info.get_image_size_with_most_features(), {}),
    lambda info: info.get_hf_config().image_token_index,
)


class _LlavaNextVision(_ClipVision, _JoinedVision):
    """The vision side of LLaVA-NeXT."""

    def merge(self, model: Any, size: Any, tiles: Tensor, newline: Tensor) -> Tensor:
        """Join the tiles of one image."""
        join = LlavaNextForConditionalGeneration._merge_image_patch_embeddings
        rows: Tensor = join(model, size, tiles, strategy="spatial_unpad")
        return rows


# LLaVA-OneVision: tiles of any resolution through a SigLIP tower, shrunk where there are many.
#
# Videos are left as they are.


class _OnevisionVision(_JoinedVision):
    """The vision side of LLaVA-OneVision."""

    _model: LlavaOnevisionForConditionalGeneration

    def __init__(self, model: LlavaOnevisionForConditionalGeneration, served: ServedState) -> None:
        super().__init__(model, served)
        if "cls_attention" in self.needs:
            layers = model.vision_tower.vision_model.encoder.layers
            self.attention_hook = AttentionHook(layers[-1].self_attn.attn)

    def encode_tiles(self, pixels: Tensor) -> Tiles:
        """Encode tiles ``(M, 3, H, W)`` in one pass of the vision tower."""
        with self.recording():
            hidden = self._model._image_pixels_to_features(self._model.vision_tower, pixels)
        signals = dict[Signal, Tensor]()
        if self.attention_hook is not None:
            signals["cls_attention"] = torch.stack(self.attention_hook.take())
        return self._model.multi_modal_projector(hidden), signals

    def merge(self, model: Any, size: Any, tiles: Tensor, newline: Tensor) -> Tensor:
        """Join the tiles of one image."""
        join = LlavaOnevisionForConditionalGeneration._merge_image_patch_embeddings
        strategy = "spatial_unpad"
        rows: Tensor = join(model, size, tiles, image_newline=newline, strategy=strategy)
        return rows


AutopruneLlavaForConditionalGeneration = prune_class(
    LlavaForConditionalGeneration, PLACEHOLDERS, LlavaVision
)
AutopruneLlavaNextForConditionalGeneration = prune_class(
    LlavaNextForConditionalGeneration,
    _NEXT_PLACEHOLDERS,
    _LlavaNextVision,
    methods=("_parse_and_validate_image_input", "_merge_image_patch_embeddings"),
)
AutopruneLlavaOnevisionForConditionalGeneration = prune_class(
    LlavaOnevisionForConditionalGeneration,
    _NEXT_PLACEHOLDERS,
    _OnevisionVision,
    methods=(
        "_parse_and_validate_image_input",
        "_image_pixels_to_features",
        "_merge_image_patch_embeddings",
    ),
)
