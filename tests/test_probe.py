"""What is read from ``/metrics``; the probe finds the times of a known server, or what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import pytest

from benchmarks.common.fake_server import Body, FakeServer, Reply, fake_server
from vllm_autoprune.advise import Known, keep_known
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.http_client import Metrics, ServerClient
from vllm_autoprune.probe import (
    Round,
    Timing,
    probe_server,
    read_times,
    read_traffic,
    solve_rounds,
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
        usage = {"prompt_tokens": tokens}
        return Reply(deltas=("a", "b"), ttft=engine + outside, gaps=(0.01,), usage=usage)

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


def running(server: PrunedServer, metrics: bool = True) -> AbstractContextManager[FakeServer]:
    return fake_server(server.reply, pages={"/metrics": server.metrics if metrics else None})


def test_the_times_of_a_known_server_are_found() -> None:
    with running(PrunedServer(selection=0.05)) as record, ServerClient(record.url) as client:
        known = probe_server(client, SIZE, rounds=2)
    values = known.values
    assert (values["tokens"], values["budget"], values["block"]) == (N, VISUAL, 16)
    # The arithmetic is tested below: a busy machine makes any of the real times longer.
    assert values["selection"] == pytest.approx(0.05, abs=0.001)
    assert {"prefill", "tower", "decode"} <= values.keys()
    assert "64 x 48 pixels" in known.notes[0]
    # Every round, and a warm-up, has a new image and two questions about it.
    texts = [json.dumps(body["messages"]) for body in record.requests]
    assert len(texts) == len(set(texts)) == 12
    urls = [url for text in texts for url in re.findall('"url": "(.*?)"', text)]
    assert len(urls) == 6 and urls[::2] == urls[1::2] and len(set(urls)) == 3


def make_round(noise: float = 0.0, metrics: bool = True) -> Round:
    """One round of a server with a HTTP time of 5 ms and a selection of 50 ms."""

    def timing(engine: float, outside: float, tokens: int) -> Timing:
        return Timing(engine + outside, (0.01,), tokens, outside if metrics else None)

    short = REQUEST - 0.005 + 20 * TOKEN + noise
    image = short + VISUAL * TOKEN + 0.05
    return Round(
        short=timing(short, 0.005, 20),
        long=timing(short + 600 * TOKEN, 0.005, 620),
        new_image=timing(image + TOWER, 0.005 + DECODE_IMAGE + PROCESSOR, 20 + VISUAL),
        known_image=timing(image, 0.005 + DECODE_IMAGE, 20 + VISUAL),
    )


def test_rounds_are_solved_for_the_times() -> None:
    rounds = [make_round(), make_round(noise=-0.01), make_round(noise=0.02)]
    assert solve_rounds(rounds, 0.05, "http://host").values == pytest.approx(
        {"budget": VISUAL, "prefill": TOKEN, "request": REQUEST, "tower": TOWER, "selection": 0.05,
         "decode_image": DECODE_IMAGE, "processor": PROCESSOR, "decode": 0.01}
    )  # fmt: skip
    # Without /metrics the front end counts as part of the tower.
    known = solve_rounds([make_round(metrics=False)], None, "http://host").values
    assert not {"decode_image", "processor", "selection"} & known.keys()
    assert known["tower"] == pytest.approx(TOWER + 0.05 + DECODE_IMAGE + PROCESSOR)


def test_a_server_without_metrics_is_probed() -> None:
    with running(PrunedServer(), metrics=False) as record, ServerClient(record.url) as client:
        known = probe_server(client, SIZE, rounds=1)
    assert known.values["tokens"] == VISUAL + NEWLINE
    assert not {"budget", "decode_image"} & known.values.keys()
    assert any("no /metrics" in note for note in known.notes)


def refuse_images(body: Body) -> Reply:
    has_image = any(part["type"] == "image_url" for part in body["messages"][0]["content"])
    return Reply(status=400, error="is not a multimodal model") if has_image else Reply(ttft=0.0)


def ever_faster(body: Body) -> Reply:
    size = len(json.dumps(body["messages"][0]["content"]))
    return Reply(ttft=0.2 if size < 400 else 0.0, usage={"prompt_tokens": size})


@pytest.mark.parametrize(
    ("reply", "model", "text"),
    [
        (refuse_images, None, "refuses a request with an image: status 400: is not a multimodal "
         "model -> serve a model that takes images"),
        (Reply(status=401, error="Unauthorized"), None, "refuses a chat request: status 401"),
        (Reply(ttft=0.0, usage={"prompt_tokens": 7}), None, "an image adds no tokens to a prompt"),
        (ever_faster, None, "takes no longer"),
        (Reply(drop=True), None, "does not answer"),
        (Reply(deltas=("a", "b"), cut=True), None, "does not answer"),
        (Reply(usage=None), None, "no token or no usage"),
        (Reply(), "other", "serves mock -> serve other"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_be_measured(
    reply: Reply | Callable[[Body], Reply], model: str | None, text: str
) -> None:
    with (
        fake_server(reply) as record,
        ServerClient(record.url) as client,
        pytest.raises(ConfigError) as caught,
    ):
        probe_server(client, SIZE, model, rounds=1)
    (problem,) = caught.value.problems
    assert text in str(problem)


# 40 requests with an image of 640 tokens and 16 of text, K = 64; 10 images; 5 s of selection.
_HISTOGRAMS = {
    "request_prompt_tokens": 3200, "request_generation_tokens": 400,
    "request_time_per_output_token_seconds": 0.8, "time_to_first_token_seconds": 100,
    "request_queue_time_seconds": 8, "request_prefill_time_seconds": 57,
    "request_prefill_kv_computed_tokens": 3200,
}  # fmt: skip
STOCK_PAGE = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{block_size="32",cache_dtype="auto",enable_prefix_caching="True"} 1.0
""" + "".join(
    f'vllm:{name}_sum{{engine="0",model_name="m"}} {total}\n'
    f'vllm:{name}_count{{engine="0",model_name="m"}} 40\n'
    for name, total in _HISTOGRAMS.items()
)
PAGE = f"""{STOCK_PAGE}\
autoprune_images_total{{chooser="state"}} 40.0
autoprune_visual_tokens_total{{stage="before"}} 25600.0
autoprune_visual_tokens_total{{stage="after"}} 2560.0
autoprune_feature_cache_hits_total 30.0
autoprune_feature_cache_misses_total 10.0
autoprune_selection_seconds_bucket{{le="+Inf"}} 40.0
autoprune_selection_seconds_count 40.0
autoprune_selection_seconds_sum 5.0
"""


def test_traffic_of_the_metrics() -> None:
    known = read_traffic(Metrics(PAGE))
    assert known.values == pytest.approx(
        {"questions": 4.0, "tokens": 640, "budget": 64, "prompt": 16, "answer": 10, "block": 32,
         "selection": 0.125, "decode": 0.02}
    )  # fmt: skip
    assert "feature cache" in known.notes[0]
    stock = read_traffic(Metrics(STOCK_PAGE))
    assert stock == Known({"answer": 10, "block": 32, "decode": pytest.approx(0.02)})
    uncached = PAGE.replace('enable_prefix_caching="True"', 'enable_prefix_caching="False"')
    assert read_traffic(Metrics(uncached)).values["block"] == 0
    assert read_traffic(Metrics("")) == read_times(Metrics(""), Known({})) == Known({})


@pytest.mark.parametrize(
    ("known", "solved"),
    [({"tower": 2.0}, {"prefill": 0.010}), ({"prefill": 0.010}, {"tower": 2.0}), ({}, {})],
)
def test_prefill_from_a_known_tower_and_the_other_way_round(
    known: dict[str, float], solved: dict[str, float]
) -> None:
    """57 s of prefill: 10 towers of 2 s, 5 s of selection, 3200 tokens of 10 ms."""
    traffic = read_traffic(Metrics(PAGE))
    times = read_times(Metrics(PAGE), keep_known(**known).filled_from(traffic))
    assert times.values == pytest.approx({"decode_image": (100 - 8 - 57) / 40, **solved})
