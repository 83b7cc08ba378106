"""Vision side of models whose image is a number of equal tiles of placeholders."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
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
    counts: ClassVar[str]
    """The field that says how many of them each image has ``(B,)``, on the CPU."""

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
    def rows(self, tiles: Tensor) -> Tensor:
        """Projected rows ``(M, n, D)`` of tiles ``(M, 3, H, W)``, as in the stock model."""

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images of one call of ``embed_multimodal``."""
        tiles, counts = inputs[self.pixels], inputs[self.counts]
        assert isinstance(tiles, Tensor) and isinstance(counts, Tensor)
        return [
            ModelImage({self.pixels: part}, len(part) * self.side**2)
            for part in tiles.split(counts.tolist())
        ]

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images in one pass of the vision tower."""
        counts = [len(image[self.pixels]) for image in images]
        with nullcontext() if self._merger_hook is None else self._merger_hook.recording():
            rows = self.rows(torch.cat([image[self.pixels] for image in images]))
        encoder, norms = (None, None) if self._merger_hook is None else self._merger_hook.take()
        attention = (
            None if self._attention_hook is None else self._pooled(self._attention_hook.take())
        )
        features, first = [], 0
        for count in counts:
            some = slice(first, first + count)
            grid = Grid(self.side, self.side, count)
            tokens = rows[some].flatten(0, 1).clone()
            cells = slice(first * self.side**2, (first + count) * self.side**2)
            before = None if encoder is None else encoder[cells].clone()
            scored = norms is not None and "merger_input" in self.needs
            region = Region(
                grid,
                tokens,
                None if attention is None else attention[some].flatten(),
                None,
                self.cosine(tokens, before, grid),
                share=count,
                encoder=before,
                merger_norms=norms[cells].clone() if norms is not None and scored else None,
            )
            features.append(ImageFeatures((region,)))
            first += count
        return features

    def _pooled(self, received: Sequence[Tensor]) -> Tensor:
        """``(M, n)``: attention of patches, the mean of those that one token is made of."""
        patches = torch.stack(list(received))
        across = isqrt(patches.shape[1])
        # Some towers have a [CLS] token before their patches, which no model here reads.
        square = patches[:, -across * across :].view(-1, across, across)
        return functional.avg_pool2d(square, across // self.side).flatten(1)
