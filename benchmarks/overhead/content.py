"""Pictures, words and request bodies, all unique so that no cache answers for the server.

Knows nothing about servers; everything is encoded before any clock starts.
"""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw


def picture(seed: int, width: int = 640, height: int = 480) -> Image.Image:
    """Shading, objects and a little grain: structured like a photo, other for every seed."""
    rng = np.random.default_rng(seed)
    down, right = np.mgrid[0:height, 0:width] / max(width, height)
    angles, phases = rng.uniform(0, 2 * np.pi, 3), rng.uniform(0, 2 * np.pi, 3)
    shade = [
        128 + 90 * np.sin(4 * (right * np.cos(a) + down * np.sin(a)) + p)
        for a, p in zip(angles, phases, strict=True)
    ]
    image = Image.fromarray(np.stack(shade, axis=2).clip(0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    for _ in range(12):
        x, y = rng.integers(0, width), rng.integers(0, height)
        size, colour = rng.integers(height // 16, height // 4), rng.integers(0, 256, 3)
        box, fill = (int(x), int(y), int(x + size), int(y + size)), tuple(map(int, colour))
        (pen.ellipse if rng.random() < 0.5 else pen.rectangle)(box, fill=fill)
    grain = rng.integers(-4, 5, (height, width, 3))
    return Image.fromarray((np.asarray(image, np.int16) + grain).clip(0, 255).astype(np.uint8))


@lru_cache(maxsize=64)
def image_url(seed: int, width: int = 640, height: int = 480) -> str:
    """The picture as a data URL holding a PNG, as chat clients send it."""
    buffer = io.BytesIO()
    picture(seed, width, height).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def words(count: int, number: int, vocabulary: int = 31_000) -> str:
    """``count`` words of one token each in the true-width shape's vocabulary; unique by number."""
    rng = random.Random(number)
    head = [number % 1000, number // 1000]  # unique at once, so that no prefix is shared
    tail = [rng.randrange(1000, vocabulary) for _ in range(count - len(head))]
    return " ".join(f"w{i}" for i in (*head, *tail))


def body(
    model: str,
    text: str,
    url: str | None = None,
    tokens: int = 1,
    budget: int | None = None,
    stream: bool = True,
) -> bytes:
    """A greedy chat request for exactly ``tokens`` tokens, ready to be sent."""
    parts: list[Mapping[str, object]] = [{"type": "text", "text": text}]
    if url is not None:
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    asked: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": parts}],
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "skip_special_tokens": False,  # the first token may be one, and is to be seen
    }
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    if budget is not None:
        asked["mm_processor_kwargs"] = {"autoprune": {"budget": budget}}
    return json.dumps(asked).encode()
