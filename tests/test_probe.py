"""What a probe says of a server's times."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.fake_server import Answer, Body, FakeServer, Reply, fake_server
from tests.pruned_server import (
    DECODE_IMAGE,
    PROCESSOR,
    REQUEST,
    SELECTION,
    TOKEN,
    TOWER,
    VISUAL,
    N,
    pruned_server,
)
from vllm_autoprune.advise import (
    Inputs,
    Timings,
    Traffic,
    estimate_ways,
    judge,
)
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.http_client import Metrics, ServerClient
from vllm_autoprune.probe import _Answer, _Round, _solve_rounds, probe_server
from vllm_autoprune.statistics import resample


@pytest.fixture
def pruned() -> Iterator[FakeServer]:
    with pruned_server() as server:
        yield server


def probe(server: FakeServer) -> Inputs:
    inputs = Inputs({})
    with ServerClient(server.url) as client:
        probe_server(client, (64, 48), inputs, rounds=2)
    return inputs


def test_a_server_is_probed_with_new_images(pruned: FakeServer) -> None:
    inputs = probe(pruned)
    values = inputs.values
    assert (values["tokens"], values["budget"], values["block"]) == (N, VISUAL, 32)
    # The arithmetic is tested below: a busy machine makes any of the real times longer.
    assert values["selection"] == pytest.approx(SELECTION, abs=0.001)
    assert {"prefill", "tower", "decode"} <= values.keys() and len(
        inputs.repeats
    ) > 1000
    assert not any("thinks" in note or "busy" in note for note in inputs.notes)
    # Every round, and a warm-up, has a new image and two questions about it.
    texts = [json.dumps(body["messages"]) for body in pruned.requests]
    assert len(texts) == len(set(texts)) == 12
    urls = [url for text in texts for url in re.findall('"url": "(.*?)"', text)]
    assert len(urls) == 6 and urls[::2] == urls[1::2] and len(set(urls)) == 3


def test_thoughts_count_as_tokens_and_metrics_may_be_missing(
    pruned: FakeServer,
) -> None:
    respond = pruned.respond

    def think(body: Body) -> Reply:
        reply = respond(body)
        assert isinstance(reply, Reply)
        return replace(reply, thoughts=2)

    pruned.respond, pruned.pages["/metrics"] = think, None
    inputs = probe(pruned)
    assert inputs.values["tokens"] == VISUAL
    assert not {"budget", "decode_image"} & inputs.values.keys()
    assert all(
        any(words in note for note in inputs.notes)
        for words in ("no /metrics", "The model thinks before it answers")
    )
    # The gap between two thoughts is one between tokens.
    assert inputs.values["decode"] == pytest.approx(0.01, abs=0.005)


def make_round(draw: Callable[[], float] = lambda: 1.0, metrics: bool = True) -> _Round:
    """One round of a server with a HTTP time of 5 ms; ``draw`` gives a factor of each time."""

    def answer(engine: float, outside: float, tokens: int, selections: int) -> _Answer:
        engine = engine * draw()
        outside = outside * draw()
        page = Metrics(
            f"vllm:request_prefill_time_seconds_sum {engine}\n"
            f"autoprune_selection_seconds_sum {selections * SELECTION * draw()}\n"
            f"autoprune_selection_seconds_count {selections}\n"
        )
        return _Answer(engine + outside, (0.01,), tokens, page if metrics else None)

    short = REQUEST - 0.005 + 20 * TOKEN
    image = short + VISUAL * TOKEN + SELECTION
    return _Round(
        answer(short, 0.005, 20, 0),
        answer(short + 600 * TOKEN, 0.005, 620, 0),
        answer(image + TOWER, 0.005 + DECODE_IMAGE + PROCESSOR, 20 + VISUAL, 1),
        answer(image, 0.005 + DECODE_IMAGE, 20 + VISUAL, 1),
    )


def test_rounds_are_solved_for_the_times() -> None:
    rounds = [
        make_round(itertools.repeat(factor).__next__) for factor in (1.0, 0.9, 1.2)
    ]
    times = {
        "tokens": VISUAL,
        "prefill": TOKEN,
        "request": REQUEST,
        "tower": TOWER,
        "selection": SELECTION,
        "decode_image": DECODE_IMAGE,
        "processor": PROCESSOR,
        "decode": 0.01,
    }
    solved = _solve_rounds(rounds)
    times["selection"] *= 3.1 / 3  # a mean
    times["tower"] -= SELECTION * 0.1 / 3
    assert solved == pytest.approx(times)
    # Without /metrics the front end counts as part of the tower.
    times["tower"] += sum(
        times.pop(name) for name in ("selection", "decode_image", "processor")
    )
    assert _solve_rounds([make_round(metrics=False)]) == pytest.approx(times)


def test_a_second_probe_falls_into_the_intervals_of_the_first() -> None:
    traffic = Traffic(
        questions=2, tokens=N, budget=VISUAL, core=24, prompt=20, answer=8
    )
    source = random.Random(0)
    within = Counter[str]()
    count = Counter[str]()

    def read_times(rounds: list[_Round]) -> Timings:
        times = _solve_rounds(rounds)
        return Timings(**{n: max(times[n], 1e-9) for n in times.keys() - {"tokens"}})

    for _ in range(25):
        rounds, others = (
            [make_round(lambda: source.lognormvariate(0, 0.2)) for _ in range(10)]
            for _ in range(2)
        )
        repeats = [read_times([rounds[i] for i in row]) for row in resample(10, 300)]
        intervals = judge(
            traffic, estimate_ways(traffic, repeats[0]), repeats
        ).intervals
        repeated = read_times(others)
        gain = judge(traffic, estimate_ways(traffic, repeated)).gain
        for name, (low, high) in intervals.items():
            within[name] += low <= {**repeated.model_dump(), "gain": gain}[name] <= high
            count[name] += 1
    assert count.keys() >= {"gain", "tower", "prefill", "processor"}
    assert [name for name in count if within[name] < 0.9 * count[name]] == []


def test_what_other_clients_do_meanwhile_counts_for_nothing(pruned: FakeServer) -> None:
    respond = pruned.respond

    def respond_to_two(body: Body) -> Reply | Answer:
        pruned.requests.append(body)
        return respond(body)

    pruned.respond = respond_to_two
    inputs = probe(pruned)
    assert any("busy" in note for note in inputs.notes)
    assert (
        inputs.values["tokens"] == VISUAL
        and not {"budget", "selection"} & inputs.values.keys()
    )


def refuse_images(body: Body) -> Reply:
    has_image = any(
        part["type"] == "image_url" for part in body["messages"][0]["content"]
    )
    return (
        Reply(status=400, error="is not a multimodal model")
        if has_image
        else Reply(ttft=0.0)
    )


def ever_faster(body: Body) -> Reply:
    size = len(json.dumps(body["messages"][0]["content"]))
    return Reply(ttft=0.2 if size < 400 else 0.0, usage={"prompt_tokens": size})


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (refuse_images, "refuses a request with an image: status 400: is not a multimodal model "
         "-> serve a model that takes images"),
        (lambda body: Reply(status=401, error="no"), "refuses a chat request: status 401"),
        (lambda body: Reply(ttft=0.0, usage={"prompt_tokens": 7}), "an image adds no tokens to a"),
        (ever_faster, "a longer prompt takes no longer"),
        (lambda body: Reply(usage=None), "a streamed answer cannot be timed: it has no usage"),
        (lambda body: (200, b"<html>", {}), "cannot be timed: the answer is not a stream: <html>"),
    ],
    ids=["image", "key", "blind", "faster", "usage", "page"],
)  # fmt: skip
def test_a_server_that_cannot_be_measured(
    reply: Callable[[Body], Reply | Answer], text: str
) -> None:
    with fake_server(reply) as server, pytest.raises(ConfigError) as caught:
        probe(server)
    assert text in str(caught.value)
