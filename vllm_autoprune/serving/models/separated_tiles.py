"""Command A Vision, LFM2-VL, Llama 4, Step 3: tiles and a view of the whole, text between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from math import isqrt, prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.image_utils import SizeDict
from transformers.models.llama4.image_processing_llama4 import (
    find_supported_resolutions,
    get_best_fit,
)
from vllm.model_executor.models.cohere2_vision import (
    Cohere2VisionForConditionalGeneration,
)
from vllm.model_executor.models.lfm2_vl import Lfm2VLForConditionalGeneration
from vllm.model_executor.models.mllama4 import Llama4ForConditionalGeneration
from vllm.model_executor.models.step3_vl import Step3VLForConditionalGeneration
from vllm.model_executor.models.step3p7 import Step3p7ForConditionalGeneration
from vllm.model_executor.models.step_vl import StepVLForConditionalGeneration

from vllm_autoprune.serving.api.placeholders import Placeholders, TokenCount
from vllm_autoprune.serving.inputs import CROP_PIXELS
from vllm_autoprune.serving.models.line import PrunedLine
from vllm_autoprune.serving.models.pruned_model import PrunedModel, prune_class
from vllm_autoprune.serving.models.tiled import TiledVision
from vllm_autoprune.serving.models.vision import (
    EncoderInputs,
    ImageInputs,
    ModelImage,
)
from vllm_autoprune.serving.worker.tower_hooks import Merger

if TYPE_CHECKING:
    from vllm.multimodal.parse import ImageSize


class _Cohere2Vision(TiledVision):
    """Command A Vision: tiles of one shape, with a line break behind each."""

    _model: Cohere2VisionForConditionalGeneration
    counts = "num_patches"
    tile_tokens = "vision_tower.vision_model.embeddings.num_patches"
    layers = "vision_tower.vision_model.encoder.layers"
    whole_last = True

    @property
    def side(self) -> int:
        """Side of a tile in tokens."""
        return super().side // self._model.multi_modal_projector.downsample_factor

    def find_merger(self) -> Merger:
        """The projector's first layer, which takes the patches of a token as one row."""
        projector = self._model.multi_modal_projector
        layer = projector.linear_1
        return Merger(layer, projector.downsample_factor**2, layer, joined=True)

    def rows(self, tiles: ImageInputs) -> Tensor:
        """Projected rows ``(M, n, D)`` of tiles ``(M, 3, H, W)``, as in the stock model."""
        features = self._model.vision_tower(tiles["pixel_values"])
        rows: Tensor = self._model.multi_modal_projector(features)
        return rows.flatten(1, 2)


class _Lfm2Vision(TiledVision):
    """LFM2-VL: tiles behind their names, and a view of any shape, which a small image is alone."""

    _model: Lfm2VLForConditionalGeneration
    counts = "num_patches"
    fields = ("pixel_values", "spatial_shapes")
    layers = "vision_tower.vision_model.encoder.layers"
    whole_last = True

    def shapes(self, tiles: ImageInputs) -> list[tuple[int, int]]:
        """Height and width, in tokens, of each tile."""
        factor = self._model.multi_modal_projector.factor
        patches = tiles["spatial_shapes"].tolist()
        return [(height // factor, width // factor) for height, width in patches]

    def received(self, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Attention ``(P,)`` that the patches of each tile receive; all are in one sequence."""
        assert self.attention is not None
        patches = self._model.multi_modal_projector.factor**2
        counts = [height * width * patches for height, width in shapes]
        return self.attention.take().received(counts)

    def find_merger(self) -> Merger:
        """The projector's norm, or else its first layer: both take a token's patches as one row."""
        projector = self._model.multi_modal_projector
        norms = projector.projector_use_layernorm
        layer = projector.layer_norm if norms else projector.linear_1
        return Merger(layer, projector.factor**2, layer, joined=True)

    def rows(self, tiles: ImageInputs) -> list[Tensor]:
        """Projected rows ``(n, D)`` of each tile, as in the stock model."""
        return self._model.image_pixels_to_features(*tiles.values())


class _Llama4Vision(TiledVision):
    """Llama 4: tiles of one shape, with a separator behind each, and a view named by a token."""

    _model: Llama4ForConditionalGeneration
    tower_name = "vision_model"
    counts = "patches_per_image"
    layers = "vision_model.model.layers"
    whole_last = True

    @property
    def side(self) -> int:
        """Side of a tile in tokens."""
        return isqrt(self._model.get_image_patches_per_chunk())

    def received(self, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Attention ``(P,)`` that the patches of each tile receive; [CLS] is the last of them."""
        return [patches[:-1] for patches in super().received(shapes)]

    def find_merger(self) -> Merger:
        """The adapter's layers, which take the patches of a token as one row."""
        adapter = self._model.vision_model.vision_adapter
        patches = round(adapter.pixel_shuffle_ratio**-2)
        return Merger(adapter.mlp, patches, adapter.mlp, joined=True)

    def rows(self, tiles: ImageInputs) -> Tensor:
        """Projected rows ``(M, n, D)`` of tiles ``(M, 3, H, W)``, as in the stock model."""
        model = self._model
        rows: Tensor = model.encode_image_chunks(
            tiles["pixel_values"], use_data_parallel=model.use_data_parallel
        )
        return rows


class _StepVision(TiledVision):
    """Step3-VL, Step-3.7: tiles of one size, if there are any, then a larger view of the whole."""

    _model: Step3VLForConditionalGeneration
    tower_name = "vision_model"
    counts = "num_patches"
    fields = (CROP_PIXELS, "pixel_values")
    layers = "vision_model.transformer.resblocks"
    attention_name = "attn.attn"
    whole_last = True

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images of one call of ``embed_multimodal``, each with its number of tiles."""
        crops, views, counts = (inputs[name] for name in (*self.fields, self.counts))
        assert isinstance(crops, Tensor)
        assert isinstance(counts, Tensor)
        images = []
        for tiles, view, count in zip(
            crops.split(counts.tolist()), views, counts, strict=True
        ):
            image = {
                CROP_PIXELS: tiles,
                "pixel_values": view[None],
                self.counts: count[None],
            }
            images.append(ModelImage(image, sum(map(prod, self.shapes(image)))))
        return images

    @cached_property
    def _width(self) -> int:
        """Width of the language model's embeddings; Step 3.5's class has no configuration."""
        return int(self._model.config.text_config.hidden_size)

    @property
    def _view(self) -> tuple[int, int]:
        """Height and width, in tokens, of the view of a whole image."""
        side = isqrt(self._model.img_output_tokens)
        return side, side

    def shapes(self, tiles: ImageInputs) -> list[tuple[int, int]]:
        """Height and width, in tokens, of each tile: those of an image, then its view."""
        side = isqrt(self._model.patch_output_tokens)
        shapes = []
        for count in tiles[self.counts].tolist():
            shapes += [*[(side, side)] * count, self._view]
        return shapes

    def _arrange(
        self, shapes: Sequence[tuple[int, int]], passes: Iterable[Iterable[Tensor]]
    ) -> list[Tensor]:
        """Results of the tower's passes, of all views and of all tiles, in the order of shapes."""
        views, *crops = map(iter, passes)
        return [
            next(views) if shape == self._view else next(crops[0]) for shape in shapes
        ]

    def received(self, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Attention ``(P,)`` that the patches of each tile receive, with that of [CLS]."""
        assert self.attention is not None
        passes = self.attention.take_each()
        return self._arrange(shapes, [queries.received() for queries in passes])

    def rows(self, tiles: ImageInputs) -> list[Tensor]:
        """Projected rows ``(n, D)`` of each tile, as in the stock model."""
        model = self._model

        def encode(name: str) -> Tensor:
            pixels = tiles[name].to(self.sample_weight.dtype)
            features = model._get_vision_model_output(pixels)
            return model._process_image_features(features)

        passes = [encode(name) for name in reversed(self.fields) if len(tiles[name])]
        return self._arrange(self.shapes(tiles), passes)


class _Step3Vision(_StepVision):
    """Step 3, whose tower has [CLS] and three copies of it before the patches."""

    layers = "vision_model.transformer.layers"
    attention_name = "self_attn.attn"


def _count_cohere2(
    info: Any, size: ImageSize, kwargs: Mapping[str, object]
) -> TokenCount:
    """Tokens and tiles of an image of Command A Vision."""
    processor = info.get_hf_processor(**kwargs)
    tiles = _count_tiles(info, size, kwargs)
    return TokenCount(tiles * processor.patch_size**2, tiles)


def _count_lfm2(info: Any, size: ImageSize, kwargs: Mapping[str, object]) -> TokenCount:
    """Tokens and tiles of an image of LFM2-VL, of which the last is as large as its view."""
    processor = info.get_hf_processor(**kwargs)
    merged = info.ctx.get_merged_mm_kwargs(kwargs)
    limits = ("min_image_tokens", "max_image_tokens")
    names = ("downsample_factor", "encoder_patch_size", *limits)
    settings = {
        name: merged.get(name, getattr(processor.image_processor, name))
        for name in names
    }
    width, height = info.smart_resize(size.height, size.width, **settings)
    view = torch.tensor([[height, width]]) // settings["encoder_patch_size"]
    view_tokens, tile_tokens = info.get_num_image_tokens(
        spatial_shapes=view, processor=processor, mm_kwargs=kwargs
    )
    tiles = _count_tiles(info, size, kwargs)
    return TokenCount(view_tokens + (tiles - 1) * tile_tokens, tiles)


def _count_llama4(
    info: Any, size: ImageSize, kwargs: Mapping[str, object]
) -> TokenCount:
    """Tokens and tiles of an image of Llama 4, which fits into the smallest canvas of tiles.

    vLLM lays out the prompt by the configuration's tiles, whatever a request's options say.
    """
    processor = info.get_hf_processor(**kwargs).image_processor
    vision = info.get_hf_config().vision_config
    side = vision.image_size
    canvases = find_supported_resolutions(
        max_num_chunks=info.get_max_num_tiles(),
        patch_size=SizeDict(height=side, width=side),
    )
    height, width = get_best_fit(
        (size.height, size.width),
        torch.tensor(canvases),
        resize_to_max_canvas=processor.resize_to_max_canvas,
    ).tolist()
    tiles = height // side * (width // side)
    if tiles > 1:
        tiles += 1
    return TokenCount(tiles * info.get_patch_per_chunk(vision), tiles)


def _count_step(info: Any, size: ImageSize, kwargs: Mapping[str, object]) -> TokenCount:
    """Tokens of an image of Step3-VL, and its tiles with the view of the whole."""
    processor = info.get_image_processor(**kwargs)
    tiles, _ = processor.patcher.get_num_patches(size.width, size.height)
    tokens = tiles * processor.num_patch_feature_size + processor.num_image_feature_size
    return TokenCount(tokens, tiles + 1)


def _count_tiles(info: Any, size: ImageSize, kwargs: Mapping[str, object]) -> int:
    """Number of tiles, with the view of all of them."""
    return int(
        info.get_num_patches(
            image_width=size.width,
            image_height=size.height,
            processor=info.get_hf_processor(**kwargs),
            mm_kwargs=kwargs,
        )
    )


def _place(
    count: Callable[[Any, ImageSize, Mapping[str, object]], TokenCount],
    largest: Callable[[Any], ImageSize] = lambda info: (
        info.get_image_size_with_most_features()
    ),
) -> Placeholders:
    """Placeholders of images whose tokens and tiles ``count`` gives, by the size of the largest."""
    return Placeholders(
        count,
        lambda info: count(info, largest(info), {}),
        lambda info: info.get_hf_processor().image_token_id,
    )


def _largest_lfm2(info: Any) -> ImageSize:
    """As many tiles as there may be, in one row."""
    from vllm.multimodal.parse import ImageSize

    processor = info.get_image_processor()
    edge = processor.tile_size
    return ImageSize(edge * processor.max_tiles, edge)


AutopruneCohere2VisionForConditionalGeneration = prune_class(
    Cohere2VisionForConditionalGeneration,
    _place(_count_cohere2),
    _Cohere2Vision,
    PrunedLine,
    methods=(),
    merger="Cohere2VisionMultiModalProjector",
)
AutopruneLfm2VLForConditionalGeneration = prune_class(
    Lfm2VLForConditionalGeneration,
    _place(_count_lfm2, _largest_lfm2),
    _Lfm2Vision,
    PrunedLine,
    methods=("image_pixels_to_features",),
    merger="Lfm2VLMultiModalProjector",
)
AutopruneLlama4ForConditionalGeneration = prune_class(
    Llama4ForConditionalGeneration,
    _place(_count_llama4),
    _Llama4Vision,
    PrunedLine,
    methods=("encode_image_chunks", "get_image_patches_per_chunk"),
    merger="Llama4VisionMLP",
)


def _prune_step(
    stock: Any, vision: type[_StepVision] = _StepVision
) -> type[PrunedModel]:
    methods = (
        "_get_vision_model_output",
        "_process_image_features",
        "img_output_tokens",
        "patch_output_tokens",
    )
    return prune_class(stock, _place(_count_step), vision, PrunedLine, methods=methods)


AutopruneStepVLForConditionalGeneration = _prune_step(StepVLForConditionalGeneration)
AutopruneStep3p7ForConditionalGeneration = _prune_step(Step3p7ForConditionalGeneration)
AutopruneStep3VLForConditionalGeneration = _prune_step(
    Step3VLForConditionalGeneration, _Step3Vision
)
