"""The probe finds the times of a server that is known beforehand, and reports what is wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from benchmarks.common.fake_server import Body, FakeServer, Reply, fake_server
from vllm_autoprune.advice.probe import Round, draw_image, probe_server, summarize
from vllm_autoprune.advice.server_client import ServerClient, Timing
from vllm_autoprune.errors import ConfigError

SIZE = (64, 48)
TEMPLATE, NEWLINE, VISUAL, N = 4, 1, 32, 288
TOKEN, REQUEST, TOWER, DECODE_IMAGE, PROCESSOR = 0.0004, 0.02, 0.3, 0.03, 0.04


@dataclass
class PrunedServer:
    """Replies and ``/metrics`` of a server whose times are the constants above."""

    images: set[str] = field(default_factory=set)
    requests: int = 0
    with_image: int = 0
    prefill: float = 0.0
    selections: float = 0.0
    selection: float = 0.0

    def reply(self, body: Body) -> Reply:
        content = body["messages"][0]["content"]
        urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
        (text,) = (part["text"] for part in content if part["type"] == "text")
        tokens = TEMPLATE + len(text.split()) + (VISUAL + NEWLINE) * len(urls)
        engine, outside = REQUEST + TOKEN * tokens, 0.0
        for url in urls:
            new = url not in self.images
            outside += DECODE_IMAGE + (PROCESSOR if new else 0.0)
            engine += self.selection + (TOWER if new else 0.0)
            self.images.add(url)
            self.with_image += 1
            self.selections += self.selection
        self.requests += 1
        self.prefill += engine
        return Reply(
            deltas=("a", "b"),
            first=engine + outside,
            gaps=(0.01,),
            usage={"prompt_tokens": tokens},
        )

    def metrics(self) -> str:
        """The page of ``/metrics``."""
        return (
            'vllm:cache_config_info{block_size="16",enable_prefix_caching="True"} 1.0\n'
            "vllm:num_requests_running 0.0\n"
            "vllm:request_queue_time_seconds_sum 0.0\n"
            f"vllm:request_prefill_time_seconds_sum {self.prefill}\n"
            f"vllm:request_prefill_time_seconds_count {self.requests}\n"
            f"autoprune_images_total {self.with_image}\n"
            f'autoprune_visual_tokens_total{{stage="before"}} {self.with_image * N}\n'
            f'autoprune_visual_tokens_total{{stage="after"}} {self.with_image * VISUAL}\n'
            f"autoprune_selection_seconds_sum {self.selections}\n"
            f"autoprune_selection_seconds_count {self.with_image}\n"
        )


@contextmanager
def running(server: PrunedServer, metrics: bool = True) -> Iterator[FakeServer]:
    with fake_server(
        server.reply, pages={"/metrics": server.metrics if metrics else None}
    ) as record:
        yield record


def test_the_times_of_a_known_server_are_found() -> None:
    with running(PrunedServer(selection=0.05)) as record, ServerClient(record.url) as client:
        known = probe_server(client, SIZE, rounds=2)
    assert (known.tokens, known.budget, known.block) == (N, VISUAL, 16)
    # The arithmetic is tested below: a busy machine makes any of the real times longer.
    assert known.selection == pytest.approx(0.05, abs=0.001)
    assert None not in (known.prefill, known.tower, known.decode)
    assert "64 x 48 pixels" in known.notes[0]


def timing(engine: float, outside: float, tokens: int, metrics: bool = True) -> Timing:
    return Timing(engine + outside, (0.01,), tokens, outside if metrics else None)


def make_round(noise: float = 0.0, metrics: bool = True) -> Round:
    """One round of a server with a HTTP time of 5 ms and a selection of 50 ms."""
    short = REQUEST - 0.005 + 20 * TOKEN + noise
    image = short + VISUAL * TOKEN + 0.05
    decoded, new = 0.005 + DECODE_IMAGE, DECODE_IMAGE + PROCESSOR
    return Round(
        short=timing(short, 0.005, 20, metrics),
        long=timing(short + 600 * TOKEN, 0.005, 620, metrics),
        first=timing(image + TOWER, 0.005 + new, 20 + VISUAL, metrics),
        another=timing(image, decoded, 20 + VISUAL, metrics),
    )


def test_rounds_are_solved_for_the_times() -> None:
    rounds = [make_round(), make_round(noise=-0.01), make_round(noise=0.02)]
    known = summarize(rounds, 0.05, "http://host")
    assert known.budget == VISUAL
    assert known.prefill == pytest.approx(TOKEN)
    assert known.request == pytest.approx(REQUEST)
    assert known.tower == pytest.approx(TOWER)
    assert known.decode_image == pytest.approx(DECODE_IMAGE)
    assert known.processor == pytest.approx(PROCESSOR)
    assert known.decode == pytest.approx(0.01)


def test_rounds_without_metrics() -> None:
    known = summarize([make_round(metrics=False)], None, "http://host")
    assert (known.decode_image, known.processor, known.selection) == (None, None, None)
    assert known.tower == pytest.approx(TOWER + 0.05 + DECODE_IMAGE + PROCESSOR)


def test_without_metrics_the_front_end_counts_as_tower() -> None:
    with running(PrunedServer(), metrics=False) as record, ServerClient(record.url) as client:
        known = probe_server(client, SIZE, rounds=2)
    assert (known.tokens, known.budget, known.decode_image) == (VISUAL + NEWLINE, None, None)
    assert known.tower == pytest.approx(TOWER + DECODE_IMAGE + PROCESSOR, abs=0.1)
    assert any("no /metrics" in note for note in known.notes)


def test_every_round_has_a_new_image_and_two_questions_about_it() -> None:
    with running(PrunedServer()) as record, ServerClient(record.url) as client:
        probe_server(client, SIZE, rounds=1)
    texts = [json.dumps(body["messages"]) for body in record.seen]
    assert len(texts) == len(set(texts)) == 8
    urls = [
        part["image_url"]["url"]
        for body in record.seen
        for part in body["messages"][0]["content"]
        if part["type"] == "image_url"
    ]
    assert len(urls) == 4 and urls[0] == urls[1] != urls[2] == urls[3]


def test_images_are_drawn_from_their_source() -> None:
    one, same, other = (draw_image(SIZE, random.Random(seed)) for seed in (1, 1, 2))
    assert one == same != other


def refuse_images(body: Body) -> Reply:
    has_image = any(part["type"] == "image_url" for part in body["messages"][0]["content"])
    return Reply(status=400, error="is not a multimodal model") if has_image else Reply(first=0.0)


def problem(record: FakeServer, model: str | None = None) -> str:
    with ServerClient(record.url, model) as client, pytest.raises(ConfigError) as caught:
        probe_server(client, SIZE, rounds=1)
    (one,) = caught.value.problems
    return str(one)


def test_a_server_without_an_image_model() -> None:
    with fake_server(refuse_images) as record:
        text = problem(record)
    assert "refuses a request with an image: status 400" in text
    assert "is not a multimodal model" in text and "serve a model that takes images" in text


def test_a_server_that_refuses_text() -> None:
    with fake_server(Reply(status=401, error="Unauthorized")) as record:
        assert "refuses a chat request: status 401" in problem(record)


def test_an_image_without_tokens() -> None:
    reply = Reply(first=0.0, usage={"prompt_tokens": 7})
    with fake_server(reply) as record:
        assert "an image adds no tokens to a prompt" in problem(record)


def test_a_server_whose_time_does_not_grow_with_the_prompt() -> None:
    def reply(body: Body) -> Reply:
        size = len(json.dumps(body["messages"][0]["content"]))
        return Reply(first=0.2 if size < 400 else 0.0, usage={"prompt_tokens": size})

    with fake_server(reply) as record:
        assert "takes no longer" in problem(record)


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (Reply(drop=True), "does not answer"),
        (Reply(deltas=("a", "b"), cut=True), "does not answer"),
        (Reply(usage=None), "no token or no usage"),
    ],
)
def test_a_broken_answer(reply: Reply, text: str) -> None:
    with fake_server(reply) as record:
        assert text in problem(record)


def test_an_unknown_model_and_no_list_of_models() -> None:
    with fake_server() as record:
        assert "serves mock -> serve other" in problem(record, "other")
    for page, text in (("[]", "no list of models"), (None, "status 404")):
        with fake_server(pages={"/v1/models": page}) as record:
            assert text in problem(record)


def test_an_unreachable_server() -> None:
    with fake_server() as record:
        pass
    assert "does not answer (ConnectError) -> start the server" in problem(record)
