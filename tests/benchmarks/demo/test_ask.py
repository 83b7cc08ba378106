"""The client against a fake server: what is sent, what is read, what is timed."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from openai import BadRequestError
from PIL import Image

from benchmarks.demo.ask import Client, query, texts
from benchmarks.demo.configurations import FULL, Configuration
from benchmarks.demo.failure import one_line
from benchmarks.minillava.engine import MAX_ANSWER_TOKENS
from benchmarks.minillava.split import Example
from tests.benchmarks.demo.fake_server import FIRST, LATER, PROMPT_TOKENS, fake_server, question_of

K8 = Configuration("state", 8)


def example(number: int = 0, question: str = "What digit?", answer: str = "7") -> Example:
    image = torch.full((3, 168, 168), number, dtype=torch.uint8)
    return Example(number, image, question, answer, "digit", None, ())


async def test_a_request_holds_the_image_as_a_png_data_url() -> None:
    with fake_server(lambda body: "7") as server:
        async with Client(server.url) as client:
            answer = await client.ask(query(example(5), "asked"), K8.extra_body)

    (body,) = server.seen
    part = body["messages"][0]["content"][0]
    head, _, data = part["image_url"]["url"].partition(",")
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
    assert head == "data:image/png;base64" and part["uuid"] == "asked-5"
    assert pixels.shape == (168, 168, 3) and (pixels == 5).all()
    assert body["temperature"] == 0 and body["max_tokens"] == MAX_ANSWER_TOKENS
    assert body["mm_processor_kwargs"] == {"autoprune": {"budget": 8, "keep": "state"}}
    assert (answer.text, answer.prompt_tokens) == ("7", PROMPT_TOKENS + 8)


async def test_answers_come_in_the_order_asked() -> None:
    queries = [(query(example(n, str(n)), "asked"), FULL.extra_body) for n in range(20)]
    steps: list[None] = []
    with fake_server(question_of) as server:
        async with Client(server.url) as client:
            answers = await client.ask_all(queries, lambda: steps.append(None), concurrency=4)

    assert texts(answers) == [str(n) for n in range(20)]
    assert len(steps) == 20


async def test_time_to_first_token_skips_the_chunk_that_only_names_the_role() -> None:
    with fake_server(lambda body: "seven") as server:
        async with Client(server.url) as client:
            timing = await client.timed(query(example(), "timed"), K8.extra_body)

    assert FIRST <= timing.ttft < FIRST + 4 * LATER
    assert timing.total - timing.ttft == pytest.approx(4 * LATER, abs=2 * LATER)
    assert timing.answer.text == "seven"
    assert timing.answer.prompt_tokens == PROMPT_TOKENS + 8
    assert server.seen[0]["ignore_eos"] is True


async def test_a_refused_question_is_told_in_one_line() -> None:
    with fake_server(lambda body: "", status=400) as server:
        async with Client(server.url) as client:
            with pytest.raises(ExceptionGroup) as caught:
                await client.ask_all([(query(example(), "asked"), {})], lambda: None)

    assert caught.group_contains(BadRequestError)
    told = one_line(caught.value)
    assert told.startswith("the server refused a question:") and "no such budget" in told
    assert "\n" not in told
