"""Gemma 3, InternVL, NVLM-D, Idefics3 and SmolVLM: an image consists of equal square tiles.

A frame of InternVL's videos is one tile.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isqrt, prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.models.gemma3_mm import Gemma3ForConditionalGeneration
from vllm.model_executor.models.idefics3 import Idefics3ForConditionalGeneration
from vllm.model_executor.models.interns1 import InternS1ForConditionalGeneration
from vllm.model_executor.models.internvl import InternVLChatModel
from vllm.model_executor.models.nvlm_d import NVLM_D_Model
from vllm.model_executor.models.qianfan_ocr import QianfanOCRForConditionalGeneration
from vllm.model_executor.models.skyworkr1v import SkyworkR1VChatModel
from vllm.model_executor.models.smolvlm import SmolVLMForConditionalGeneration

from vllm_autoprune.serving.api.placeholders import Placeholders, TokenCount
from vllm_autoprune.serving.api.positions import ItemFields, ItemSize
from vllm_autoprune.serving.compat import depends_on
from vllm_autoprune.serving.inputs import VIDEO_FIELDS, VIDEO_TILES
from vllm_autoprune.serving.models.line import PrunedLine
from vllm_autoprune.serving.models.pruned_model import PrunedModel, prune_class
from vllm_autoprune.serving.models.vision import (
    EncoderInputs,
    ImageInputs,
    ModelImage,
    Vision,
)
from vllm_autoprune.serving.worker.features import ImageFeatures, Region, Signal
from vllm_autoprune.serving.worker.tower_hooks import Merger
from vllm_autoprune.tpdsl.tokens import Grid

if TYPE_CHECKING:
    from vllm.multimodal.parse import ImageSize


class TiledVision(Vision):
    """Vision side for images whose tiles come in one tensor; one may have another shape."""

    counts: ClassVar[str]
    """Field with the number of tiles of each image ``(B,)``, on the CPU."""
    fields: ClassVar[tuple[str, ...]] = ("pixel_values",)
    """Fields of tiles ``(M, 3, H, W)``, and of masks of their pixels ``(M, H, W)`` if there are
    any."""
    tile_tokens: ClassVar[str]
    """Dotted name, within the model, of the number of tokens of one square tile, n."""
    apart: ClassVar[bool] = False
    """Whether tokens are chosen tile by tile, because the prompt fixes how many each tile keeps."""
    whole_last: ClassVar[bool] = False
    """Whether the last tile shows the whole image, and is the first to get a share of the budget.
    """

    @abstractmethod
    def rows(self, tiles: ImageInputs) -> Sequence[Tensor] | Tensor:
        """Projected rows ``(n, D)`` of each of the tiles ``(M, ...)``, as in the stock model."""

    @property
    def side(self) -> int:
        """Side of a square tile in tokens."""
        return isqrt(attrgetter(self.tile_tokens)(self._model))

    def shapes(self, tiles: ImageInputs) -> list[tuple[int, int]]:
        """Height and width, in tokens, of each tile."""
        return [(self.side, self.side)] * len(next(iter(tiles.values())))

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images or videos of one call of ``embed_multimodal``."""
        video_names = [name for name in VIDEO_FIELDS if name in inputs]
        counts = inputs[VIDEO_TILES if video_names else self.counts]
        names = video_names or self.fields
        assert isinstance(counts, Tensor)
        fields = []
        for name in names:
            tiles = inputs[name]
            assert isinstance(tiles, Tensor)
            fields.append(tiles.split(counts.tolist()))
        images = []
        for parts in zip(*fields, strict=True):
            image = dict(zip(names, parts, strict=True))
            images.append(ModelImage(image, sum(map(prod, self.shapes(image)))))
        return images

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images or videos in one pass of the vision tower."""
        tiles = {
            name: torch.cat([image[name] for image in images]) for name in images[0]
        }
        shapes = self.shapes(tiles)
        counts = [*map(prod, shapes)]
        with self.recording():
            rows = self.rows(tiles)
        # Signals (n, ...) of each tile.
        signals: dict[Signal, Sequence[Tensor]] = {
            signal: hook.take().split(counts) for signal, hook in self.merger.items()
        }
        if self.attention is not None:
            pairs = zip(self.received(shapes), shapes, strict=True)
            signals["cls_attention"] = [self._pool(*pair) for pair in pairs]
        places = torch.arange(sum(counts), device=rows[0].device).split(counts)
        are_videos = not tiles.keys().isdisjoint(VIDEO_FIELDS)

        def make_region(numbers: Sequence[int], start: int) -> Region:
            """Copy the tokens of some tiles of the image whose tiles begin at ``start``."""

            def join(parts: Sequence[Tensor] | Tensor) -> Tensor:
                return torch.cat([parts[number] for number in numbers])

            grid = Grid(*shapes[numbers[0]], len(numbers), video=are_videos)
            of_region = {signal: join(parts) for signal, parts in signals.items()}
            order = join(places) - places[start][0] if self.whole_last else None
            return Region(grid, join(rows), of_region, order=order, share=len(numbers))

        features = []
        start = 0
        for image in images:
            end = start + len(self.shapes(image))
            groups = self._group_tiles([*range(start, end)], shapes)
            regions = tuple(make_region(group, start) for group in groups)
            features.append(ImageFeatures(regions))
            start = end
        return features

    def _group_tiles(
        self, numbers: list[int], shapes: Sequence[tuple[int, int]]
    ) -> list[list[int]]:
        """Tiles of an image that are chosen from together: neighbours of one shape."""
        if self.whole_last:
            numbers = numbers[-1:] + numbers[:-1]
        if self.apart:
            return [[number] for number in numbers]
        return [[*tiles] for _, tiles in groupby(numbers, shapes.__getitem__)]

    def received(self, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Attention ``(P,)`` that the patches of each tile receive, with that of [CLS]."""
        assert self.attention is not None
        return self.attention.take().received()

    def _pool(self, patches: Tensor, shape: tuple[int, int]) -> Tensor:
        """Means ``(n,)`` over the patches of each token, without [CLS] before them."""
        height, width = shape
        factor = isqrt(len(patches) // (height * width))
        grid = patches[-height * width * factor**2 :]
        grid = grid.view(1, height * factor, width * factor)
        return functional.avg_pool2d(grid, factor).flatten()


class _Gemma3Vision(TiledVision):
    """Gemma 3: one pooled square of tokens per image, and one per crop of pan-and-scan."""

    _model: Gemma3ForConditionalGeneration
    counts = "num_patches"
    tile_tokens = "config.mm_tokens_per_image"
    layers = "vision_tower.vision_model.encoder.layers"
    apart = True

    def rows(self, tiles: ImageInputs) -> Tensor:
        """Projected rows ``(M, n, D)`` of tiles ``(M, 3, H, W)``, as in the stock model."""
        model = self._model
        features = model._image_pixels_to_features(
            model.vision_tower, tiles["pixel_values"]
        )
        rows: Tensor = model.multi_modal_projector(features)
        return rows


class _InternVLVision(TiledVision):
    """InternVL of transformers: crops and a thumbnail, each a pixel-shuffled square of tokens."""

    counts = "image_num_patches"
    tile_tokens = "num_image_token"
    layers = "vision_tower.encoder.layer"
    attention_name = "attention.attn"
    projector: ClassVar[str] = "multi_modal_projector"

    def find_merger(self) -> Merger:
        """The projector, which takes the four patches of a token as one row."""
        model: Any = self._model
        projector = getattr(model, self.projector)
        patches = model.downsample_ratio**-2
        return Merger(projector, round(patches), projector, joined=True)

    def rows(self, tiles: ImageInputs) -> Tensor:
        """Projected rows ``(M, n, D)`` of tiles ``(M, 3, H, W)``, as in the stock model."""
        model: Any = self._model
        rows: Tensor = model.extract_feature(*tiles.values())
        return rows


class _InternVLChatVision(_InternVLVision):
    """InternVL as first published: the same tiles under other names."""

    tower_name = "vision_model"
    projector = "mlp1"
    fields = ("pixel_values_flat",)
    tile_tokens = "vision_model.embeddings.num_patches"
    layers = "vision_model.encoder.layers"
    attention_name = "attn.attn"

    @property
    def side(self) -> int:
        """Side of a tile in tokens; the processor cuts tiles to the size of the tower's input."""
        return round(super().side * self._model.downsample_ratio)


class _NvlmVision(_InternVLChatVision):
    """NVLM-D: InternVL's tiles, each behind the text that names it, and the whole image last."""

    whole_last = True


@depends_on(
    "vllm.model_executor.models.idefics3:Idefics3Model", "image_pixels_to_features"
)
class _Idefics3Vision(TiledVision):
    """Idefics3 and SmolVLM, which vLLM serves with the same model.

    Tiles and the whole image are each a pixel-shuffled square of tokens after a text that names it.
    """

    _model: Idefics3ForConditionalGeneration
    tower_name = "model.vision_model"
    counts = "num_patches"
    fields = ("pixel_values", "pixel_attention_mask")
    tile_tokens = "model.image_seq_len"
    layers = "model.vision_model.encoder.layers"
    whole_last = True

    def find_merger(self) -> Merger:
        """The projection, which takes the patches of a token as one row."""
        connector = self._model.model.connector
        projection = connector.modality_projection
        return Merger(projection, connector.scale_factor**2, projection, joined=True)

    def rows(self, tiles: ImageInputs) -> Tensor:
        """Projected rows ``(M, n, D)`` of tiles ``(M, 3, H, W)``, including blank tiles.

        The stock model drops tiles of zeros as padding. But a plain grey picture has such tiles,
        and its placeholders count them.
        """
        model = self._model.model
        (pixels, masks) = (tiles[name] for name in self.fields)
        features = model.image_pixels_to_features(pixels, masks, remove_padding=False)
        rows: Tensor = model.connector(features)
        return rows


def _measure(info: Any, item: ItemFields) -> ItemSize:
    """Size of a processed video: its number of frames."""
    return ItemSize(frames=int(item[VIDEO_TILES].data) if VIDEO_TILES in item else 0)


@dataclass(frozen=True)
class _TileCounter:
    """Counts tiles by a model's processor; all tiles have the same number of tokens."""

    tile_tokens: str
    """Attribute of the processor with the number of tokens of a tile."""
    image_token: Callable[[Any], int] = lambda info: (
        info.get_hf_processor().image_token_id
    )
    """Id of the placeholder of an image, from the model's processing info."""
    largest: Callable[[Any], ImageSize] = lambda info: (
        info.get_image_size_with_most_features()
    )
    """Size of the image that has most tokens."""
    options: bool = True
    """Whether a request's processor options change the number of tiles."""
    text: str = ""
    """As in :class:`Placeholders`."""
    video_token: Callable[[Any], int] | None = None
    """As in :class:`Placeholders`."""

    def count(
        self, info: Any, size: ImageSize, kwargs: Mapping[str, object]
    ) -> TokenCount:
        """Tokens and tiles of an image of this size."""
        processor = info.get_hf_processor(**kwargs)
        tokens = info.get_num_image_tokens(
            image_width=size.width,
            image_height=size.height,
            processor=processor,
            **({"mm_kwargs": kwargs} if self.options else {}),
        )
        return TokenCount(tokens, tokens // attrgetter(self.tile_tokens)(processor))

    def placeholders(self) -> Placeholders:
        """Placeholders of images, and of videos if their tokens can be chosen."""
        return Placeholders(
            self.count,
            lambda info: self.count(info, self.largest(info), {}),
            self.image_token,
            text=self.text,
            video_token=self.video_token,
            measure=None if self.video_token is None else _measure,
        )


def _largest_idefics3(info: Any) -> ImageSize:
    """A square, because every image is enlarged until it is cut into tiles."""
    from vllm.multimodal.parse import ImageSize

    edge = info.get_hf_processor().image_processor.max_image_size["longest_edge"]
    return ImageSize(edge, edge)


AutopruneGemma3ForConditionalGeneration = prune_class(
    Gemma3ForConditionalGeneration,
    _TileCounter(
        "image_seq_length", lambda info: info.get_hf_config().image_token_index
    ).placeholders(),
    _Gemma3Vision,
    PrunedLine,
    methods=("_image_pixels_to_features",),
)
AutopruneInternS1ForConditionalGeneration = prune_class(
    InternS1ForConditionalGeneration,
    _TileCounter(
        "image_seq_length",
        video_token=lambda info: info.get_tokenizer().convert_tokens_to_ids(
            info.get_hf_processor().video_token
        ),
    ).placeholders(),
    _InternVLVision,
    PrunedLine,
    methods=("extract_feature",),
    merger="InternS1MultiModalProjector",
)


def _prune_internvl_chat(
    stock: Any,
    vision: type[_InternVLChatVision] = _InternVLChatVision,
    *,
    text: str = "<image>",
    **video: Any,
) -> type[PrunedModel]:
    counter = _TileCounter(
        "image_seq_length",
        lambda info: info.get_hf_processor().ctx_image_token_id,
        options=False,
        text=text,
        **video,
    )
    methods = ("extract_feature", "_init_mlp1")
    return prune_class(
        stock, counter.placeholders(), vision, PrunedLine, methods=methods
    )


AutopruneInternVLChatModel = _prune_internvl_chat(
    InternVLChatModel,
    video_token=lambda info: info.get_hf_processor().ctx_video_token_id,
)
AutopruneQianfanOCRForConditionalGeneration = _prune_internvl_chat(
    QianfanOCRForConditionalGeneration
)
AutopruneSkyworkR1VChatModel = _prune_internvl_chat(SkyworkR1VChatModel)
AutopruneNVLM_D_Model = _prune_internvl_chat(
    NVLM_D_Model, _NvlmVision, text="<image>\n"
)


def _prune_idefics3(stock: Any) -> type[PrunedModel]:
    counter = _TileCounter("image_seq_len", largest=_largest_idefics3)
    return prune_class(
        stock,
        counter.placeholders(),
        _Idefics3Vision,
        PrunedLine,
        methods=(),
        merger="idefics3.Idefics3SimpleMLP",
    )


AutopruneIdefics3ForConditionalGeneration = _prune_idefics3(
    Idefics3ForConditionalGeneration
)
AutopruneSmolVLMForConditionalGeneration = _prune_idefics3(
    SmolVLMForConditionalGeneration
)
