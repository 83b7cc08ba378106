"""Vision side of models whose image is a number of equal tiles of placeholders."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import isqrt
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.model_executor.models.interfaces import SupportsMultiModal

from vllm_autoprune.serving.models.vision import EncoderInputs, ImageInputs, ModelImage, Vision
from vllm_autoprune.serving.shared.placeholders import TokenCount
from vllm_autoprune.serving.shared.served_state import ServedState
from vllm_autoprune.serving.worker.attention_hook import AttentionHook
from vllm_autoprune.serving.worker.features import ImageFeatures, Region
from vllm_autoprune.serving.worker.merger_hook import MergerHook
from vllm_autoprune.tpdsl.tokens import Grid

if TYPE_CHECKING:
    from vllm.model_executor.models.gemma3_mm import Gemma3ProcessingInfo
    from vllm.model_executor.models.interns1 import InternS1ProcessingInfo
    from vllm.multimodal.parse import ImageSize

    TiledInfo: TypeAlias = Gemma3ProcessingInfo | InternS1ProcessingInfo


def count_image_tokens(
    info: TiledInfo, size: ImageSize, kwargs: Mapping[str, object]
) -> TokenCount:
    """Count tokens and tiles: all tiles have equally many, and the whole image is one of them."""
    processor = info.get_hf_processor(**kwargs)
    tokens = info.get_num_image_tokens(
        image_width=size.width, image_height=size.height, processor=processor, mm_kwargs=kwargs
    )
    return TokenCount(tokens, tokens // processor.image_seq_length)


def count_largest_image_tokens(info: TiledInfo) -> TokenCount:
    """Count the tokens of the image size that has most of them."""
    return count_image_tokens(info, info.get_image_size_with_most_features(), {})


class TiledVision(Vision):
    """Vision side whose images' tiles come in one tensor."""

    pixels: ClassVar[str]
    """The field of tiles ``(M, 3, H, W)``."""
    masks: ClassVar[str] = ""
    """The field of masks of the tiles' pixels ``(M, H, W)``; empty where there is none."""
    counts: ClassVar[str]
    """The field that says how many of them each image has ``(B,)``, on the CPU."""
    apart: ClassVar[bool] = False
    """Whether text stands between the tiles of an image: tokens are then chosen tile by tile."""
    first: ClassVar[int] = 0
    """Number of the tile that then takes what does not divide, as in ``Placeholders.first``."""

    def __init__(self, model: SupportsMultiModal, served: ServedState) -> None:
        super().__init__(model, served)
        self.side = isqrt(self.tile_tokens())
        reads = "cls_attention" in self.needs
        self._attention_hook = AttentionHook(self.last_attention()) if reads else None
        self._merger_hook = self.merger_hook() if self.reads_encoder else None

    @abstractmethod
    def tile_tokens(self) -> int:
        """Number of tokens of one square tile, n."""

    @abstractmethod
    def last_attention(self) -> nn.Module:
        """Attention module of the last layer that the model reads."""

    def merger_hook(self) -> MergerHook | None:
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
        with ExitStack() as stack:
            for hook in (self._attention_hook, self._merger_hook):
                if hook is not None:
                    stack.enter_context(hook.recording())
            rows = self.rows(tiles)
        merger_input = None if self._merger_hook is None else self._merger_hook.take()
        attention = (
            None if self._attention_hook is None else self._pooled(self._attention_hook.take())
        )
        features, start = [], 0
        for count in counts:
            runs = [1] * count if self.apart else [count]
            regions = []
            for tiles_of_run in runs:
                some = slice(start, start + tiles_of_run)
                regions.append(self._region(rows, some, attention, merger_input))
                start += tiles_of_run
            features.append(ImageFeatures(tuple(regions), first=self.first))
        return features

    def _region(
        self,
        rows: Tensor,
        tiles: slice,
        attention: Tensor | None,
        merger_input: tuple[Tensor, Tensor] | None,
    ) -> Region:
        """Tokens of adjacent tiles that one selection chooses from."""
        count = tiles.stop - tiles.start
        grid = Grid(self.side, self.side, count)
        tokens = rows[tiles].flatten(0, 1).clone()
        cells = slice(tiles.start * self.size, tiles.stop * self.size)
        encoder = None if merger_input is None else merger_input[0][cells].clone()
        scored = merger_input is not None and "merger_input" in self.needs
        return Region(
            grid,
            tokens,
            None if attention is None else attention[tiles].flatten().clone(),
            None,
            self.cosine(tokens, encoder, grid),
            share=count,
            encoder=encoder,
            merger_norms=merger_input[1][cells].clone()
            if merger_input is not None and scored
            else None,
        )

    def _pooled(self, received: Sequence[Tensor]) -> Tensor:
        """``(M, n)``: attention of patches, the mean of those that one token is made of."""
        patches = torch.stack(list(received))
        across = isqrt(patches.shape[1])
        # Some towers have a [CLS] token before their patches, which no model here reads.
        square = patches[:, -across * across :].view(-1, across, across)
        return functional.avg_pool2d(square, across // self.side).flatten(1)
