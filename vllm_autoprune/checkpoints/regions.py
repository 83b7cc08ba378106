"""A region of an image, from which one selection was made, and pictures of what the model sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from PIL import Image
from torch import Tensor

from vllm_autoprune.tpdsl.executor.materialize import PruningPolicy
from vllm_autoprune.tpdsl.outcome import RefinedTokens
from vllm_autoprune.tpdsl.tokens import VisualTokens


@dataclass(frozen=True)
class SelectedRegion:
    """One region of an image: its picture, its tokens (B = 1), and what a policy keeps of them.

    ``policy`` has the region's share of K. The grid of ``tokens`` covers ``picture``.
    """

    picture: Image.Image
    policy: PruningPolicy
    tokens: VisualTokens
    refined: RefinedTokens


class Normalisation(Protocol):
    """Mean and standard deviation with which an image processor normalises pixels."""

    image_mean: list[float]
    image_std: list[float]


def restore_picture(pixels: Tensor, normalisation: Normalisation) -> Image.Image:
    """The picture of normalised pixel values ``(3, H, W)``."""
    pixels = pixels.float()
    mean = pixels.new_tensor(normalisation.image_mean)[:, None, None]
    std = pixels.new_tensor(normalisation.image_std)[:, None, None]
    levels = ((pixels * std + mean) * 255).round().clamp(0, 255).byte()
    return Image.fromarray(levels.permute(1, 2, 0).contiguous().numpy())


def join_tiles(tiles: Sequence[Image.Image]) -> Image.Image:
    """Tiles of one size side by side."""
    width, height = tiles[0].size
    joined = Image.new("RGB", (width * len(tiles), height))
    for number, tile in enumerate(tiles):
        joined.paste(tile, (number * width, 0))
    return joined
