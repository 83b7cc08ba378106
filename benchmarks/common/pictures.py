"""Pictures with the statistics of photographs, drawn from a seed, as data URLs.

The dead-leaves model: opaque shapes of many sizes, radii falling as r ** -3, each hiding what lies
behind it. Its edges, occlusions and 1/f spectrum are those of photographs (Lee, Mumford & Huang,
"Occlusion models for natural images", 2001). Noise has no redundancy, so neither image codecs nor
policies that look for redundancy would be measured on realistic input.
"""

from __future__ import annotations

import base64
import io
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

_LEAVES = 700
_SMALLEST = 1 / 160
_LARGEST = 1 / 3


def draw_picture(seed: int, width: int, height: int) -> Image.Image:
    """An RGB picture; the same seed gives the same pixels, another seed another picture."""
    generator = np.random.default_rng(seed)
    side = max(width, height)
    image = Image.new("RGB", (width, height), _draw_colour(generator))
    pen = ImageDraw.Draw(image)
    palette = [_draw_colour(generator) for _ in range(12)]
    for radius in _draw_radii(generator, _LEAVES) * side:
        x, y = float(generator.uniform(0, width)), float(generator.uniform(0, height))
        stretch = float(generator.uniform(0.5, 1.0))
        box = (x - radius, y - stretch * radius, x + radius, y + stretch * radius)
        base = palette[int(generator.integers(len(palette)))]
        fill = tuple(int(np.clip(c + generator.integers(-24, 25), 0, 255)) for c in base)
        (pen.ellipse if generator.random() < 0.6 else pen.rectangle)(box, fill=fill)
    soft = image.filter(ImageFilter.GaussianBlur(side / 900))
    return _add_light_and_grain(soft, generator)


def encode_picture(image: Image.Image, kind: Literal["jpeg", "png"] = "png") -> str:
    """The picture as a data URL, as chat clients send it."""
    buffer = io.BytesIO()
    if kind == "jpeg":
        image.save(buffer, format="JPEG", quality=85)
    else:
        image.save(buffer, format="PNG", compress_level=3)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _draw_radii(generator: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Radii with density r ** -3 between the bounds, as a share of the longer side, (count,)."""
    share = generator.random(count)
    inverse = _SMALLEST**-2 - share * (_SMALLEST**-2 - _LARGEST**-2)
    # The few large surfaces of a photograph are in the background: they are drawn first.
    large = generator.uniform(_LARGEST / 2, _LARGEST, size=count // 20)
    return np.concatenate([large, inverse**-0.5])


def _draw_colour(generator: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = generator.normal(118, 48, size=3).clip(8, 247).astype(int)
    return int(red), int(green), int(blue)


def _add_light_and_grain(image: Image.Image, generator: np.random.Generator) -> Image.Image:
    """A brightness gradient across the picture, and the noise of a sensor."""
    pixels = np.asarray(image, dtype=np.float32)
    height, width = pixels.shape[:2]
    down, right = np.mgrid[0:height, 0:width].astype(np.float32) / max(width, height)
    angle = generator.uniform(0, 2 * np.pi)
    light = 1 + 0.25 * (np.cos(angle) * (right - 0.5) + np.sin(angle) * (down - 0.5))
    grain = generator.normal(0, 2, size=(height, width, 1)).astype(np.float32)
    lit = pixels * light[..., None].astype(np.float32) + grain
    return Image.fromarray(lit.clip(0, 255).astype(np.uint8))
