"""`cost` and `advise`: formulas, the verdict, what a probe says of a server's times.

Published efficiency tables are recomputed by ``tests/benchmarks/cost``.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoConfig

from benchmarks.yardsticks.examples import LLAVA
from tests.fake_server import Answer, Body, FakeServer, Reply, fake_server
from tests.test_explain import write_video
from vllm_autoprune import positions
from vllm_autoprune.advise import (
    Inputs,
    Timings,
    Traffic,
    Way,
    estimate_ways,
    judge,
)
from vllm_autoprune.backbones import (
    BACKBONE_SHAPES,
    count_tower_flops,
    find_backbone,
)
from vllm_autoprune.cli.main import main
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.http_client import Metrics, ServerClient
from vllm_autoprune.probe import _Answer, _Round, _solve_rounds, probe_server
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.serving.api import layout
from vllm_autoprune.statistics import resample
from vllm_autoprune.tpdsl.loading import load_state

Captured = pytest.CaptureFixture[str]


def run_json(capsys: Captured, call: str, *words: str) -> dict[str, Any]:
    assert main([*call.split(), *words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert isinstance(record, dict)
    return record


def test_layers_by_hand() -> None:
    # Gemma 3's 8 heads of 256 in a model 2560 wide: queries are narrower than the model.
    layer = replace(BACKBONE_SHAPES["gemma-3-4b"], layers=1)
    projections = 2 * 2560 * (2 * 2048 + 2 * 1024)
    attention = 2 * 2 * 2048
    feed_forward = 2 * 3 * 2560 * 10240
    assert layer.estimate_cost(1).flops == projections + attention + feed_forward
    # Three layers of four keep a state and no keys; keys 2048 wide, values 4096, one token.
    qwen = BACKBONE_SHAPES["qwen3.5-9b"]
    four = replace(qwen, layers=4)
    feed_forward = 2 * 3 * 4096 * 12288
    linear = 2 * (4096 * (2 * 2048 + 3 * 4096) + 3 * 4096 * 128)
    full = 2 * (4096 * (2 * 4096 + 2 * 1024) + 2 * 4096)
    assert four.estimate_cost(1).flops == 3 * linear + full + 4 * feed_forward
    assert qwen.estimate_cost(100).kv_bytes == 8 * 100 * 2 * 1024 * 2


def test_cost_counts_text_and_refuses_what_is_no_number(capsys: Captured) -> None:
    record = run_json(capsys, "cost --backbone llava-1.5-7b --text 60")
    rows = [(row["tokens"], row["kv_mib"]) for row in record["rows"]]
    assert rows == [(576, 318), (64, 62)] and record["assumptions"]
    record = run_json(capsys, "cost --backbone llava-1.5-7b --tokens 100% 1/9 64")
    assert [row["tokens"] for row in record["rows"]] == [576, 64, 64]
    assert main(["cost", "--backbone", "llava-1.5-7b", "--text", "-1"]) == 1
    assert "--text: -1 is not a number of tokens" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["cost", "--backbone", "llava-1.5-7b", "--text", "٣"])
    assert "argument --text: '٣' is not a number of tokens" in capsys.readouterr().err


def test_every_served_family_has_a_backbone_that_its_hub_id_names() -> None:
    from vllm_autoprune.serving.models import BACKBONES

    families = {backbone.name for backbone in BACKBONES.values()}
    assert families == {shape.family for shape in BACKBONE_SHAPES.values()}
    for shape in BACKBONE_SHAPES.values():
        assert find_backbone(re.split("[:;]", shape.source)[0]) == shape
    assert [
        BACKBONE_SHAPES[name].sign for name in ("llava-1.5-7b", "qwen2.5-vl-7b")
    ] == ["-", "+"]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llava-next-7b", {"model_type": "llama"}),
        (
            "qwen3.5-35b-a3b",
            {
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
            },
        ),
        (
            "glm-4.5v",
            {
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 1408,
                "n_shared_experts": 1,
            },
        ),
    ],
)
def test_a_config_with_the_numbers_of_a_backbone_costs_as_much(
    name: str, fields: dict[str, object], tmp_path: Path
) -> None:
    shape = BACKBONE_SHAPES[name]
    text = {
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "head_dim": 128,
        "intermediate_size": shape.feed_forward,
        "num_key_value_heads": shape.kv_width // 128,
        "num_attention_heads": (shape.query_width or shape.width) // 128,
        **fields,
    }
    config = {"model_type": shape.family, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = find_backbone(str(tmp_path))
    assert read.estimate_cost(64, text=9) == shape.estimate_cost(64, text=9)


@pytest.mark.parametrize(
    ("backbone", "text"),
    [
        (
            "nobody/nothing",
            "nobody/nothing: has no config.json of a model, here or on the Hub",
        ),
        (
            "benchmarks/yardsticks/weights/minillava/clip",
            "'CLIPModel' has no pruned form: vLLM takes no images",
        ),
        ("", "checkpoint: /: has no config.json of a model"),
    ],
)
def test_a_backbone_that_cannot_be_read_is_refused_in_one_line(
    backbone: str, text: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["cost", "--backbone", backbone]) == 1
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


TRAFFIC = Traffic(
    questions=4,
    tokens=640,
    budget=64,
    core=48,
    template=16,
    prompt=20,
    answer=11,
    block=32,
)
TIMINGS = Timings(
    tower=10.0,
    prefill=1.0,
    decode_image=2.0,
    processor=3.0,
    selection=5.0,
    request=7.0,
    decode=0.5,
)


def changed(**fields: float) -> Traffic:
    return TRAFFIC.model_copy(update=fields)


@pytest.mark.parametrize(
    ("way", "new", "another"),
    [
        # 656 tokens are known of another question, 640 of them in whole blocks.
        ("stock", (5, 10, 0, 7, 640, 36), (2, 0, 0, 7, 16, 20)),
        ("question-reading", (5, 10, 5, 7, 64, 36), (2, 0, 5, 7, 64, 36)),
        # Template and core end on a block edge.
        ("split", (5, 10, 10, 7, 64, 36), (2, 0, 5, 7, 16, 20)),
        ("question-free", (5, 10, 5, 7, 64, 36), (2, 0, 0, 7, 16, 20)),
        ("resized", (5, 1, 0, 7, 64, 36), (2, 0, 0, 7, 16, 20)),
    ],
)
def test_parts_of_each_way(
    way: Way, new: tuple[int, ...], another: tuple[int, ...]
) -> None:
    estimate = estimate_ways(TRAFFIC, TIMINGS)[way]
    parts = (
        "front end",
        "vision tower",
        "selection",
        "request",
        "prefill of the image",
        "prefill of text",
    )
    assert estimate.first.seconds == dict(zip(parts, new, strict=True))
    assert estimate.another.seconds == dict(zip(parts, another, strict=True))
    total = sum(new) + 3 * sum(another) + 4 * 10 * 0.5
    assert estimate.total_seconds == pytest.approx(total)
    assert 4 * sum(estimate.mean_question.values()) == pytest.approx(total)


def test_whole_blocks_are_shared() -> None:
    reading = estimate_ways(changed(template=40), TIMINGS)["question-reading"]
    for question in (reading.first, reading.another):
        assert question.seconds["prefill of text"] == 8 + 20
    # A core without an edge of a block is no split.
    ways = estimate_ways(changed(budget=12, core=8, template=0), TIMINGS)
    assert ways["split"] == ways["question-reading"]
    uncached = estimate_ways(changed(block=0), TIMINGS)
    for estimate in uncached.values():
        image = "prefill of the image"
        assert estimate.another.seconds[image] == estimate.first.seconds[image]
    assert uncached["question-reading"].cheaper_than_stock == {"from": 1.0, "to": None}
    # A selection of 5 s, and a second less for the image of each question.
    slow = TIMINGS.model_copy(update={"prefill": 1 / 576})
    free = estimate_ways(changed(block=0), slow)["question-free"]
    assert free.advantage == "from 5.0 questions on"
    reading = estimate_ways(TRAFFIC, slow)["question-reading"]
    assert reading.cheaper_than_stock is None


@pytest.mark.parametrize("template", [0, 3, 16, 40])
def test_a_core_is_aligned_as_it_is_served(template: int) -> None:
    for core in (1, 15, 33, 47, 63):
        traffic = changed(template=template, core=core)
        served = layout.align_core(template, traffic.budget, core, traffic.block)
        assert traffic.served_core == served
    assert changed(template=template, core=64).served_core == 64, "all tokens"


@pytest.mark.parametrize(
    ("traffic", "timings", "helps", "parts"),
    [
        ({}, {}, True, ["Pruning helps here"]),
        ({"questions": 1}, {}, True, ["choose by accuracy"]),
        ({"questions": 60}, {}, True, ["Only a question-free state pays"]),
        ({"questions": 5000}, {}, False, ["Pruning will not help you here."]),
        ({}, {"prefill": 1e-6, "decode_image": 5.0}, False,
         ["is front end: have clients send smaller images"]),
        ({"questions": 1}, {"prefill": 1e-5, "request": 0.0}, False,
         ["max_pixels", "Resizing images to 320 tokens"]),
        ({}, {"tower": 0.001, "prefill": 1e-6, "request": 1.0}, False,
         ["serve more requests at once"]),
        ({"answer": 1000}, {"prefill": 1e-4, "decode": 0.1}, False,
         ["is decoding: answer shorter"]),
        ({"budget": 2880}, {}, False, ["keeps every token"]),
    ],
)  # fmt: skip
def test_the_verdict(
    traffic: dict[str, float], timings: dict[str, float], helps: bool, parts: list[str]
) -> None:
    """Prefill of an image takes 28.8 s, its tower 1 s."""
    sizes = Traffic(questions=2, tokens=2880, budget=320, core=256, prompt=20, answer=1)
    sizes = sizes.model_copy(update=traffic)
    times = Timings(tower=1.0, prefill=0.01, request=0.1).model_copy(update=timings)
    verdict = judge(sizes, estimate_ways(sizes, times))
    text = "\n".join(verdict.lines)
    assert verdict.helps == helps == text.startswith("Pruning helps here")
    assert [words for words in parts if words not in text] == []


@pytest.fixture
def split(tmp_path: Path) -> str:
    """A state of N / 8 tokens, half of them core."""
    state = load_state("miniqwen").model_dump(mode="json", by_alias=True)
    path = tmp_path / "split.json"
    path.write_text(json.dumps({**state, "core": {"share": 0.5}}))
    return str(path)


ENOUGH = "advise --tokens 576 --tower-ms 1 --prefill-ms-per-token 1 --questions"


def test_what_flags_and_states_say_is_used_and_the_rest_is_assumed(
    split: str, capsys: Captured
) -> None:
    """The verdict in words is that of docs/choosing.md, which ``tests/docs`` compares."""
    for flags, budget, core in (
        ("", 72, 36),
        ("--budget 64", 64, 32),
        ("--budget 64 --core 8", 64, 8),
        ("--budget 1/3", 192, 96),
        ("--budget 1%:16-64", 16, 8),
    ):
        traffic = run_json(capsys, f"{ENOUGH} 2 {flags} --state", split)["traffic"]
        assert (traffic["budget"], traffic["core"]) == (budget, core)
    call = "advise --questions 2 --tokens 640 --tower-ms 1 --prefill-ms-per-token 0.2"
    record = run_json(capsys, f"{call} --block-size 0")
    assert record["seconds"]["prefill"] == pytest.approx(0.0002)
    traffic = record["traffic"]
    notes = "\n".join(record["notes"])
    assert (traffic["block"], traffic["budget"], traffic["core"]) == (0, 71, 53)
    for words in (
        "K = 71",
        "K_c = 53",
        "decode image, processor, selection, request, decode",
    ):
        assert words in notes
    assert main(call.split()) == 0
    assert "prefill 0.2" in capsys.readouterr().out


def test_it_is_said_where_kept_tokens_stand(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = load_state("divprune").model_dump(mode="json", by_alias=True)
    (tmp_path / "true.json").write_text(json.dumps({**data, "positions": "true"}))
    state = ["--state", str(tmp_path / "true.json")]
    qwen = ["--checkpoint", str(build("qwen3_vl", tmp_path / "qwen3_vl"))]
    llava = ["--checkpoint", str(LLAVA)]

    def note(*words: str) -> str:
        notes: list[str] = run_json(capsys, f"{ENOUGH} 2", *words)["notes"]
        return next((note for note in notes if note.startswith("Kept tokens")), "")

    sentence = (
        "Kept tokens stand where they stood in the whole image, as the state says"
    )
    assert note() == "" and note(*state, *llava) == f"{sentence}."
    assert (
        note(*state) == f"{sentence}; with M-RoPE they keep their places in the image."
    )
    assert note(*llava) == f"{sentence}."  # of the state to start with
    packed = note("--state", "autoprune", *llava)
    assert packed.startswith("Kept tokens stand one after the other, as if the image")
    for words in (qwen, [*qwen, *state], [*qwen, "--state", "divprune"]):
        assert note(*words).endswith(
            "keep their places in the image, because the model has M-RoPE."
        )
    monkeypatch.setattr(
        positions, "find_packed_reason", lambda *_: "has windows that slide"
    )
    assert note(*state, *llava).endswith(
        "as if the image had been small: the model has windows that slide."
    )


@pytest.mark.parametrize(
    ("call", "texts"),
    [
        ("advise", ["4 problems", "--questions: is not known", "--probe WIDTHxHEIGHT"]),
        ("advise --server http://h", ["--server: needs --probe"]),
        ("advise --server http://127.0.0.1:1 --probe 8x8", ["does not answer"]),
        (f"{ENOUGH} 0.5", ["--questions: 0.5 is refused -> give a value that is greater than"]),
        (f"{ENOUGH} 1 --budget 577",
         ["--budget: is 577 -> give at most the value of --tokens, 576"]),
    ],
)  # fmt: skip
def test_unanswerable_questions(call: str, texts: list[str], capsys: Captured) -> None:
    assert main(call.split()) == 1
    error = capsys.readouterr().err
    assert all(text in error for text in texts), error


TOKEN = 0.0002
REQUEST = 0.02
TOWER = 0.3
DECODE_IMAGE = 0.03
PROCESSOR = 0.04
SELECTION = 0.01
VISUAL = 32
N = 288


@pytest.fixture
def pruned() -> Iterator[FakeServer]:
    """A server that keeps 32 of 288 tokens of an image, with the ``/metrics`` of that."""

    def reply(body: Body) -> Reply:
        *images, text = body["messages"][0]["content"]
        # Words of a few letters are one token here, longer ones two.
        words = sum(1 + (len(word) > 4) for word in text["text"].split())
        tokens = words + VISUAL * len(images)
        usage = {"prompt_tokens": tokens}
        return Reply(deltas=("a", "b"), ttft=TOKEN * tokens, gaps=(0.01,), usage=usage)

    def metrics() -> str:
        # Those of other clients come first: they count for nothing.
        images = 900 + sum(
            len(body["messages"][0]["content"]) - 1 for body in server.requests
        )
        return (
            'vllm:cache_config_info{block_size="32",enable_prefix_caching="True"} 1.0\n'
            f"vllm:request_prefill_time_seconds_count {len(server.requests)}\n"
            f"autoprune_images_total {images}\n"
            f'autoprune_visual_tokens_total{{stage="before"}} {images * N}\n'
            f'autoprune_visual_tokens_total{{stage="after"}} {images * VISUAL}\n'
            f"autoprune_selection_seconds_sum {images * SELECTION}\n"
            f"autoprune_selection_seconds_count {images}\n"
        )

    with fake_server(reply, pages={"/metrics": metrics}) as server:
        yield server


def probe(server: FakeServer) -> Inputs:
    inputs = Inputs({})
    with ServerClient(server.url) as client:
        probe_server(client, (64, 48), inputs, rounds=2)
    return inputs


def test_a_server_is_probed_with_new_images(
    pruned: FakeServer, split: str, capsys: Captured
) -> None:
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
    # A state has its budget from the tokens that were found.
    call = f"advise --server {pruned.url} --questions 3 --probe 64x48 --state"
    record = run_json(capsys, call, split)
    traffic = record["traffic"]
    verdict = record["verdict"]
    assert (traffic["tokens"], traffic["budget"], traffic["core"]) == (
        N,
        N // 8,
        N // 16,
    )
    low, high = verdict["intervals"]["gain"]
    assert f"another probe finds {low:.2f}x to {high:.2f}x." in "\n".join(
        verdict["lines"]
    )
    times = r"[\d.]+ ms \([\d.]+ to [\d.]+\)"
    pattern = (
        r"Measured with images of 64 x 48 "
        rf".* first question {times}, another question {times}"
    )
    assert any(re.match(pattern, note) for note in record["notes"])


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


def test_too_wide_an_interval_is_no_verdict() -> None:
    prefills = (1.0, 0.001, 0.001, 1.0, 1.0)
    repeats = [TIMINGS.model_copy(update={"prefill": seconds}) for seconds in prefills]
    verdict = judge(TRAFFIC, estimate_ways(TRAFFIC, TIMINGS), repeats)
    assert verdict.helps is None and verdict.lines[0].startswith(
        "This probe does not tell"
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


# ---- cells of a picture ----


@pytest.mark.parametrize(
    ("family", "vision", "cells", "teraflops"),
    [
        (
            "qwen3_vl",
            {"out_hidden_size": 4096},
            (1024, 4096, 3796, 949),
            (5.80, 48.2, 42.4, 5.23),
        ),
        (
            "qwen2_5_vl",
            {"hidden_size": 1280},
            (1369, 5329, 4956, 1239),
            (7.70, 36.9, 33.7, 6.92),
        ),
    ],
)
def test_flops_of_a_tower_are_those_of_its_published_sizes(
    family: str,
    vision: dict[str, int],
    cells: tuple[int, ...],
    teraflops: tuple[float, ...],
) -> None:
    """Full attention everywhere, and in 4 of 32 layers with windows of 64 patches elsewhere."""
    config = AutoConfig.for_model(family, vision_config=vision)
    counted = [count_tower_flops(config, number) / 1e12 for number in cells]
    assert counted == pytest.approx(teraflops, rel=2e-3)


def test_a_picture_costs_less_without_its_blank_cells(
    tmp_path: Path, capsys: Captured
) -> None:
    """64 cells, of which the lower half is noise: 33 stay, and the others are drawn in grey."""
    noise = Image.effect_noise((256, 128), 64).convert("RGB")
    picture = Image.new("RGB", (256, 256), "white")
    picture.paste(noise, (0, 128))
    picture.save(tmp_path / "page.png")
    call = f"advise --image {tmp_path / 'page.png'} -o {tmp_path / 'cells.png'} --budget 40"
    rows = run_json(capsys, call)["cells"]
    assert [(row["rule"], row["cells"], row["K"]) for row in rows] == [
        ("none", 64, 40),
        ("predicted", 33, 33),
        ("flat", 33, 33),
    ]
    tower = [float(row["tower, TFLOPs"]) for row in rows]
    assert 0.45 < tower[1] / tower[0] < 0.52
    drawn = Image.open(tmp_path / "cells.png")
    corners = [drawn.getpixel(place) for place in ((0, 0), (40, 0), (255, 127))]
    assert corners == [(255, 255, 255), (178, 178, 178), (178, 178, 178)]
    assert drawn.crop((0, 128, 256, 256)).tobytes() == noise.tobytes()


def test_a_video_is_decoded_and_encoded_whole_whatever_is_pruned(
    tmp_path: Path, capsys: Captured
) -> None:
    for number in range(8):
        Image.new("RGB", (112, 84), (9 * number, 0, 0)).save(tmp_path / f"{number}.png")

    def advise(*more: str, status: int = 0) -> Any:
        assert main(["advise", "--video", str(tmp_path), "--json", *more]) == status
        return json.loads(capsys.readouterr().out)

    record = advise("--budget", "tokens_per_frame:3")
    assert record["positions"].endswith("because the model has M-RoPE.")
    rows = record["rows"]
    vision = {"hidden_size": 1280, "out_hidden_size": 3584}
    assert [(row["frames"], row["tokens"]) for row in rows] == [
        (4, 48),
        (4, 12),
        (1, 12),
    ]
    tower = (
        count_tower_flops(AutoConfig.for_model("qwen2_5_vl", vision_config=vision), 12)
        / 1e12
    )
    assert [row["tower, TFLOPs"] for row in rows] == pytest.approx(
        [4 * tower, 4 * tower, tower]
    )
    assert record["decoding_seconds"] > 0 and "outweighs" in record["verdict"][-1]
    fast = ("--budget", "1/4", "--prefill-ms-per-token", "1e-6")
    assert (
        advise(*fast)["verdict"][-1]
        == "Most is decoding, which pruning does not shorten."
    )
    assert "K keeps every token" in advise("--budget", "100%")["verdict"][0]
    compass = build("cohere_compass", tmp_path / "compass")
    advice = advise("--checkpoint", str(compass))["verdict"][0]
    assert (
        advice == "Pruning will not help here: videos of this model are served whole."
    )
    video = write_video(tmp_path / "a.mp4", 40)
    assert advise("--video", str(video))["rows"][0]["frames"] == 5, (
        "two frames a second, in pairs"
    )
    wrong = advise("--video", str(tmp_path / "0.png"), status=1)
    assert wrong["problems"][0]["fix"] == "give one, or a folder of frames"
