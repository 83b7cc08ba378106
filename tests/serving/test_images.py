"""Unusual and broken images: a pruned server answers wherever stock vLLM does."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable

import pytest
from PIL import Image

from benchmarks.server import Server
from tests.serving.engine import examples, picture
from tests.serving.paths import TOKENS

pytestmark = pytest.mark.engine


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    content = io.BytesIO()
    image.save(content, form, **options)
    return content.getvalue()


def scene(number: int = 0) -> Image.Image:
    return picture(examples(4)[number].image)


def truncated() -> list[bytes]:
    return [encoded(scene())[:-200]]


def header_only() -> list[bytes]:
    return [encoded(scene())[:20]]


def nothing() -> list[bytes]:
    return [b""]


def no_image() -> list[bytes]:
    return [b"GIF89a not an image"]


def one_pixel() -> list[bytes]:
    return [encoded(Image.new("RGB", (1, 1), (255, 0, 0)))]


def thin() -> list[bytes]:
    return [encoded(Image.new("RGB", (10_000, 10), (0, 99, 0)))]


def tall() -> list[bytes]:
    return [encoded(Image.new("RGB", (10, 10_000), (0, 99, 0)))]


def cmyk() -> list[bytes]:
    return [encoded(scene().convert("CMYK"), "JPEG")]


def transparent() -> list[bytes]:
    return [encoded(scene().convert("RGBA"))]


def palette() -> list[bytes]:
    return [encoded(scene().convert("P"), "GIF")]


def sixteen_bits() -> list[bytes]:
    return [encoded(Image.new("I;16", (40, 40), 40_000))]


def animated() -> list[bytes]:
    frames = [scene(i) for i in range(3)]
    return [encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])]


def twenty() -> list[bytes]:
    # None is used by other tests, because stock vLLM fails on these images later, see below.
    return [encoded(scene().rotate(1 + i)) for i in range(20)]


def one_of_two_broken() -> list[bytes]:
    return [encoded(scene()), encoded(scene())[:-200]]


KINDS = (
    *(truncated, header_only, nothing, no_image, one_pixel, thin, tall, cmyk, transparent),
    *(palette, sixteen_bits, animated, twenty, one_of_two_broken),
)


def answer(server: Server, images: list[bytes]) -> tuple[int, int]:
    """Status, and prompt tokens where there is an answer."""
    urls = ["data:image/png;base64," + base64.b64encode(image).decode() for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": "What is it?"}]
    sent = {
        "model": server.model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 2,
    }
    status, reply = server.post("/v1/chat/completions", sent)
    usage = reply.get("usage")
    return status, int(usage["prompt_tokens"]) if isinstance(usage, dict) else 0


@pytest.mark.parametrize("encode_images", KINDS, ids=lambda encode_images: encode_images.__name__)
def test_a_pruned_server_answers_as_stock_does(
    stock: Server, pruned: Server, encode_images: Callable[[], list[bytes]]
) -> None:
    images = encode_images()
    (status, full), (same, kept) = answer(stock, images), answer(pruned, images)
    if (
        len(images) * TOKENS > 2048
    ):  # twenty images exceed the context of stock vLLM, but not of a pruned server
        assert (status, same) == (400, 200)
        assert kept < len(images) * TOKENS
        return
    assert same == status < 500
    if status == 200:
        assert kept == full - len(images) * (TOKENS - 32)


def test_both_servers_still_answer(stock: Server, pruned: Server) -> None:
    # Not one of the twenty: vLLM 0.32 caches images of a prompt that it refuses as too long, and
    # answers 500 to later requests with one of them, because the engine never received it.
    unseen = [encoded(scene().rotate(45))]
    assert [answer(server, unseen)[0] for server in (stock, pruned)] == [200, 200]
