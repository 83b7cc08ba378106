"""Chat requests of benchmarks: pictures with the statistics of photographs, and bodies.

Pictures are dead leaves: opaque shapes of many sizes, radii falling as r ** -3, each hiding what
lies behind it. Their edges, occlusions and 1/f spectrum are those of photographs (Lee, Mumford &
Huang, "Occlusion models for natural images", 2001). Noise has no redundancy, so neither image
codecs nor policies that look for redundancy would be measured on realistic input.
"""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

_LEAVES = 700
_SMALLEST = 1 / 160
_LARGEST = 1 / 3
"""Smallest and largest radius, as a share of the longer side."""


def draw_picture(seed: int, width: int, height: int) -> Image.Image:
    """Draw an RGB picture; a seed always gives the same pixels, and other seeds other pictures."""
    generator = np.random.default_rng(seed)

    def draw_colour() -> tuple[int, int, int]:
        red, green, blue = generator.normal(118, 48, size=3).clip(8, 247).astype(int)
        return int(red), int(green), int(blue)

    side = max(width, height)
    image = Image.new("RGB", (width, height), draw_colour())
    pen = ImageDraw.Draw(image)
    palette = [draw_colour() for _ in range(12)]
    # Radii of density r ** -3 between the bounds. Some large shapes are drawn before all others,
    # because the large surfaces of a photograph are in its background.
    inverse = _SMALLEST**-2 - generator.random(_LEAVES) * (_SMALLEST**-2 - _LARGEST**-2)
    large = generator.uniform(_LARGEST / 2, _LARGEST, size=_LEAVES // 20)
    for radius in np.concatenate([large, inverse**-0.5]) * side:
        x = float(generator.uniform(0, width))
        y = float(generator.uniform(0, height))
        stretch = float(generator.uniform(0.5, 1.0))
        box = (x - radius, y - stretch * radius, x + radius, y + stretch * radius)
        base = palette[int(generator.integers(len(palette)))]
        fill = tuple(
            int(np.clip(c + generator.integers(-24, 25), 0, 255)) for c in base
        )
        (pen.ellipse if generator.random() < 0.6 else pen.rectangle)(box, fill=fill)
    # A brightness gradient across the picture, and the noise of a sensor.
    pixels = np.asarray(
        image.filter(ImageFilter.GaussianBlur(side / 900)), dtype=np.float32
    )
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float32) / side
    angle = generator.uniform(0, 2 * np.pi)
    light = 1 + 0.25 * (np.cos(angle) * (columns - 0.5) + np.sin(angle) * (rows - 0.5))
    grain = generator.normal(0, 2, size=(height, width, 1)).astype(np.float32)
    lit = pixels * light[..., None].astype(np.float32) + grain
    return Image.fromarray(lit.clip(0, 255).astype(np.uint8))


def crop_pictures(seed: int, count: int, width: int, height: int) -> list[Image.Image]:
    """Draw ``count`` pictures of which no two are equal, as windows of one of four times the area.

    Drawing each by itself takes a second, and what is measured may take less.
    """
    canvas = draw_picture(seed, 2 * width, 2 * height)
    corners = random.Random(seed).sample(range(width * height), count)
    windows = []
    for corner in corners:
        y, x = divmod(corner, width)
        windows.append(canvas.crop((x, y, x + width, y + height)))
    return windows


def encode_picture(image: Image.Image, kind: Literal["jpeg", "png"] = "png") -> str:
    """The picture as a data URL, as chat clients send it."""
    buffer = io.BytesIO()
    if kind == "jpeg":
        image.save(buffer, format="JPEG", quality=85)
    else:
        image.save(buffer, format="PNG", compress_level=3)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def build_content(
    question: str, urls: Iterable[str] = ()
) -> list[Mapping[str, object]]:
    """The parts of a user's message: images, then the question."""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*images, {"type": "text", "text": question}]


def build_body(
    model: str,
    content: Sequence[Mapping[str, object]],
    *,
    tokens: int,
    stream: bool = True,
    fields: Mapping[str, object] | None = None,
) -> bytes:
    """A greedy request of one turn for at most ``tokens`` tokens; a stream ends with the usage.

    ``fields`` are added to the body.
    """
    turns = [{"role": "user", "content": content}]
    return build_chat(model, turns, tokens=tokens, stream=stream, fields=fields)


def build_chat(
    model: str,
    messages: Sequence[Mapping[str, object]],
    *,
    tokens: int,
    stream: bool = True,
    fields: Mapping[str, object] | None = None,
) -> bytes:
    """A greedy request of several turns, as :func:`build_body`."""
    body: dict[str, object] = {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": tokens,
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps({**body, **(fields or {})}).encode()
