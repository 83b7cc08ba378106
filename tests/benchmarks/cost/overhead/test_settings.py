"""Request bodies of the overhead measurements: pictures, unique questions, fields."""

from __future__ import annotations

import base64
import io
import json

from PIL import Image

from benchmarks.common.pictures import draw_picture
from benchmarks.cost.overhead.settings import build_request, draw_words, image_url


def test_the_url_contains_the_picture() -> None:
    data = image_url(3, 64, 48).partition("base64,")[2]

    opened = Image.open(io.BytesIO(base64.b64decode(data)))
    assert opened.format == "PNG" and opened.tobytes() == draw_picture(3, 64, 48).tobytes()


def test_texts_differ_in_their_first_two_words() -> None:
    heads = {tuple(draw_words(8, number).split()[:2]) for number in range(3000)}

    assert len(heads) == 3000
    assert len(draw_words(88, 7).split()) == 88


def test_a_body_asks_for_exactly_that_many_tokens() -> None:
    body = json.loads(build_request("m", "why?", "data:x", tokens=3, budget=64))

    assert body["max_tokens"] == 3 and body["ignore_eos"]
    assert [part["type"] for part in body["messages"][0]["content"]] == ["image_url", "text"]
    assert body["mm_processor_kwargs"] == {"autoprune": {"budget": 64}}


def test_a_text_request_has_no_pruning_fields() -> None:
    assert "mm_processor_kwargs" not in json.loads(build_request("m", "why?"))
