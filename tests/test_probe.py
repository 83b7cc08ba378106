"""What is read from ``/metrics``; the probe finds the times of a known server, or what is wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from benchmarks.common.fake_server import Body, FakeServer, Reply, fake_server
from vllm_autoprune.advise import Known, keep_known
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.http_client import Metrics, ServerClient
from vllm_autoprune.probe import (
    Round,
    Timing,
    draw_image,
    probe_server,
    read_times,
    read_traffic,
    summarize,
)

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
    assert (known.values.get("tokens"), known.values.get("budget"), known.values.get("block")) == (
        N,
        VISUAL,
        16,
    )
    # The arithmetic is tested below: a busy machine makes any of the real times longer.
    assert known.values.get("selection") == pytest.approx(0.05, abs=0.001)
    assert None not in (
        known.values.get("prefill"),
        known.values.get("tower"),
        known.values.get("decode"),
    )
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
    assert known.values.get("budget") == VISUAL
    assert known.values.get("prefill") == pytest.approx(TOKEN)
    assert known.values.get("request") == pytest.approx(REQUEST)
    assert known.values.get("tower") == pytest.approx(TOWER)
    assert known.values.get("decode_image") == pytest.approx(DECODE_IMAGE)
    assert known.values.get("processor") == pytest.approx(PROCESSOR)
    assert known.values.get("decode") == pytest.approx(0.01)


def test_rounds_without_metrics() -> None:
    known = summarize([make_round(metrics=False)], None, "http://host")
    assert (
        known.values.get("decode_image"),
        known.values.get("processor"),
        known.values.get("selection"),
    ) == (None, None, None)
    assert known.values.get("tower") == pytest.approx(TOWER + 0.05 + DECODE_IMAGE + PROCESSOR)


def test_without_metrics_the_front_end_counts_as_tower() -> None:
    with running(PrunedServer(), metrics=False) as record, ServerClient(record.url) as client:
        known = probe_server(client, SIZE, rounds=2)
    assert (
        known.values.get("tokens"),
        known.values.get("budget"),
        known.values.get("decode_image"),
    ) == (VISUAL + NEWLINE, None, None)
    assert known.values.get("tower") == pytest.approx(TOWER + DECODE_IMAGE + PROCESSOR, abs=0.1)
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
    with ServerClient(record.url) as client, pytest.raises(ConfigError) as caught:
        probe_server(client, SIZE, model, rounds=1)
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


def test_an_unknown_model() -> None:
    with fake_server() as record:
        assert "serves mock -> serve other" in problem(record, "other")


def test_an_unreachable_server() -> None:
    with fake_server() as record:
        pass
    assert "does not answer (ConnectError) -> start the server" in problem(record)


# 40 requests with an image of 640 tokens and 16 of text, K = 64; 10 images; 5 s of selection.
PAGE = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{block_size="32",cache_dtype="auto",enable_prefix_caching="True"} 1.0
vllm:request_prompt_tokens_sum{engine="0",model_name="m"} 3200.0
vllm:request_prompt_tokens_count{engine="0",model_name="m"} 40.0
vllm:request_generation_tokens_sum{engine="0",model_name="m"} 400.0
vllm:request_generation_tokens_count{engine="0",model_name="m"} 40.0
vllm:request_time_per_output_token_seconds_sum{engine="0",model_name="m"} 0.8
vllm:request_time_per_output_token_seconds_count{engine="0",model_name="m"} 40.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 100.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 40.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 8.0
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 40.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 57.0
vllm:request_prefill_time_seconds_count{engine="0",model_name="m"} 40.0
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="m"} 3200.0
vllm:request_prefill_kv_computed_tokens_count{engine="0",model_name="m"} 40.0
autoprune_images_total{chooser="state"} 40.0
autoprune_visual_tokens_total{stage="before"} 25600.0
autoprune_visual_tokens_total{stage="after"} 2560.0
autoprune_feature_cache_hits_total 30.0
autoprune_feature_cache_misses_total 10.0
autoprune_selection_seconds_bucket{le="+Inf"} 40.0
autoprune_selection_seconds_count 40.0
autoprune_selection_seconds_sum 5.0
"""


def test_traffic() -> None:
    known = read_traffic(Metrics(PAGE))
    assert (
        known.values.get("questions"),
        known.values.get("tokens"),
        known.values.get("budget"),
    ) == (4.0, 640, 64)
    assert (known.values.get("prompt"), known.values.get("answer"), known.values.get("block")) == (
        16,
        10,
        32,
    )
    assert known.values.get("selection") == pytest.approx(0.125) and known.values.get(
        "decode"
    ) == pytest.approx(0.02)
    assert "feature cache" in known.notes[0]


def test_prefill_from_a_given_tower_and_the_other_way_round() -> None:
    """57 s of prefill: 10 towers of 2 s, 5 s of selection, 3200 tokens of 10 ms."""
    traffic = read_traffic(Metrics(PAGE))
    times = read_times(Metrics(PAGE), keep_known(tower=2.0).filled_from(traffic))
    assert times.values.get("prefill") == pytest.approx(0.010) and times.values.get("tower") is None
    times = read_times(Metrics(PAGE), keep_known(prefill=0.01).filled_from(traffic))
    assert times.values.get("tower") == pytest.approx(2.0) and times.values.get("prefill") is None
    assert times.values.get("decode_image") == pytest.approx((100 - 8 - 57) / 40)


def test_neither_can_be_read_without_the_other() -> None:
    times = read_times(Metrics(PAGE), read_traffic(Metrics(PAGE)))
    assert times.values.get("tower") is None and times.values.get("prefill") is None


def test_a_server_without_the_plugin_says_nothing_about_images() -> None:
    stock = "\n".join(line for line in PAGE.splitlines() if not line.startswith("autoprune"))
    known = read_traffic(Metrics(stock))
    assert (
        known.values.get("questions"),
        known.values.get("tokens"),
        known.values.get("budget"),
        known.values.get("prompt"),
    ) == (None, None, None, None)
    assert known.values.get("answer") == 10


def test_an_idle_server_and_one_without_a_prefix_cache() -> None:
    assert read_traffic(Metrics("")) == Known({})
    page = PAGE.replace('enable_prefix_caching="True"', 'enable_prefix_caching="False"')
    assert read_traffic(Metrics(page)).values["block"] == 0
    assert read_times(Metrics(""), Known({})) == Known({})
