"""The demo's client against a fake server: requests and answers."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.common import BenchmarkError
from benchmarks.common.fake_server import Body, Reply, fake_server
from benchmarks.demo.chat_client import ask, ask_all, build_query
from benchmarks.demo.configurations import FULL, Configuration
from benchmarks.demo.failure import describe_failure
from benchmarks.minillava.engine import MAX_ANSWER_TOKENS
from benchmarks.minillava.split import Example
from tests.benchmarks.demo.sample_replies import question_of

K8 = Configuration("state", 8)
SEVEN = Reply(("7",), first=0.0, usage={"prompt_tokens": 28})


def example(number: int = 0, question: str = "What digit?", answer: str = "7") -> Example:
    image = torch.full((3, 168, 168), number, dtype=torch.uint8)
    return Example(number, image, question, answer, "digit", None, ())


def test_a_request_contains_the_image_as_a_png_data_url() -> None:
    with fake_server(SEVEN, model=None) as server:
        answer = ask(server.url, build_query(example(5), "asked"), K8.extra_body)

    (body,) = server.seen
    part = body["messages"][0]["content"][0]
    head, _, data = part["image_url"]["url"].partition(",")
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
    assert head == "data:image/png;base64" and part["uuid"] == "asked-5"
    assert pixels.shape == (168, 168, 3) and (pixels == 5).all()
    assert body["temperature"] == 0 and body["max_tokens"] == MAX_ANSWER_TOKENS
    assert "ignore_eos" not in body
    assert body["mm_processor_kwargs"] == {"autoprune": {"budget": 8, "keep": "state"}}
    assert (answer.text, answer.prompt_tokens) == ("7", 28)


def test_answers_come_in_the_order_of_the_questions() -> None:
    queries = [(build_query(example(n, str(n)), "asked"), FULL.extra_body) for n in range(20)]
    steps: list[None] = []

    def reply(body: Body) -> Reply:
        # Later questions are answered earlier.
        return Reply((question_of(body),), first=0.1 / (1 + int(question_of(body))))

    with fake_server(reply, model=None) as server:
        answers = ask_all(server.url, queries, lambda: steps.append(None), concurrency=4)

    assert [answer.text for answer in answers] == [str(n) for n in range(20)]
    assert len(steps) == 20


def test_an_empty_answer_is_an_answer() -> None:
    with fake_server(Reply(("",), first=0.0), model=None) as server:
        assert ask(server.url, build_query(example(), "asked"), {}).text == ""


@pytest.mark.parametrize(
    ("reply", "begin", "detail"),
    [
        (Reply(status=400, error="no such budget"), "the server refused a question:", "no such"),
        (Reply(drop=True), "the server stopped answering; its log is in --out", "no answer"),
    ],
)
def test_a_failed_question_is_described_in_one_line(reply: Reply, begin: str, detail: str) -> None:
    with (
        fake_server(reply, model=None) as server,
        pytest.raises(BenchmarkError) as caught,
    ):
        ask_all(server.url, [(build_query(example(), "asked"), {})], lambda: None)

    line = describe_failure(caught.value)
    assert line.startswith(begin) and detail in line
    assert "\n" not in line
