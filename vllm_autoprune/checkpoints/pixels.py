"""From what a model is given back to a picture.

Knows nothing about models.
"""

from __future__ import annotations

from typing import Protocol

from PIL import Image
from torch import Tensor


class Normalisation(Protocol):
    """The part of an image processor that says how pixels were normalised."""

    image_mean: list[float]
    image_std: list[float]


def picture_of(pixels: Tensor, normalised: Normalisation) -> Image.Image:
    """Pixel values ``(3, H, W)`` as the picture they show: what was cropped away is not there."""
    mean = pixels.new_tensor(normalised.image_mean)[:, None, None]
    std = pixels.new_tensor(normalised.image_std)[:, None, None]
    levels = ((pixels.float() * std + mean) * 255).round().clamp(0, 255).byte()
    return Image.fromarray(levels.permute(1, 2, 0).contiguous().numpy())
