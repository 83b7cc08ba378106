"""What the benchmarks share: the streaming client, the fake server, shapes of models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoProcessor

from benchmarks import BenchmarkError
from benchmarks.common.client import Client, Record
from benchmarks.common.memory import PeakMemory, read_peak_memory
from benchmarks.common.shapes import (
    TOKENS,
    count_kv_bytes,
    count_visual_tokens,
    draw_words,
    read_shape,
    write_shape,
)
from benchmarks.server import ServerDied
from tests.fake_server import MODEL, Reply, fake_server
from tests.tables import parametrize_from_file
from vllm_autoprune.backbones import BackboneShape
from vllm_autoprune.tower import VisionTower

# ---- the streaming client, against a server whose schedule is known beforehand ----


def send(reply: Reply, model: str = MODEL) -> Record:
    body = {"model": model, "max_tokens": 10, "stream": True}
    with fake_server(reply) as server:
        return Client(server.url).send(json.dumps(body).encode())


def test_stamps_are_in_order_and_usage_is_read() -> None:
    record = send(Reply(ttft=0.02, gaps=(0.005,)))
    assert record.ok and record.text == "0 1 2 3 4 5 6 7 8 9 "
    times = [record.scheduled, record.started, *record.deltas, record.done]
    assert times == sorted(times)
    # The time to first token also includes connecting, which the schedule of the server does not.
    assert record.ttft >= 0.02
    assert (record.prompt_tokens, record.completion_tokens) == (600, 10)
    assert record.tpot == pytest.approx((record.deltas[-1] - record.deltas[0]) / 9)
    without_usage = send(Reply(usage=None, ttft=0.01, gaps=(0.001,)))
    assert (
        without_usage.ok
        and without_usage.completion_tokens is without_usage.tpot is None
    )


def test_latency_counts_from_when_a_request_was_due() -> None:
    with fake_server(Reply(("yes",), ttft=0.01), model=None) as server:
        client = Client(server.url, clock=lambda: 100.0)
        record = client.send(b'{"stream": true}', scheduled=97.5, index=3)
    assert record.index == 3 and record.delay == record.ttft == record.e2e == 2.5


@pytest.mark.parametrize(
    ("reply", "model", "message"),
    [
        (Reply(status=500), MODEL, "status 500: .*the engine is gone"),
        (Reply(), "other", "status 404: .*does not exist"),
        (Reply(drop=True), MODEL, "no answer: "),
    ],
)
def test_every_failure_is_recorded_in_one_line(
    reply: Reply, model: str, message: str
) -> None:
    record = send(reply, model)
    assert not record.ok and re.search(message, str(record.error))


# ---- models of true widths, and servers that do not start ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shape(
        "llava-1.5-7b", tmp_path_factory.mktemp("shape") / "llava", layers=3
    )


def test_widths_are_those_of_llava_7b_without_weights(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    text = config.text_config
    vision = config.vision_config
    assert (text.hidden_size, text.intermediate_size, text.num_attention_heads) == (
        4096,
        11008,
        32,
    )
    assert (text.num_hidden_layers, text.vocab_size) == (3, 32064)
    tower = (vision.hidden_size, vision.num_hidden_layers, vision.num_attention_heads)
    assert tower == (1024, 24, 16)
    assert (
        (vision.image_size // vision.patch_size) ** 2
        == TOKENS
        == count_visual_tokens(folder)
    )
    assert config.image_token_index == 32000
    # A key and a value of 32 heads x 128 numbers in each of three layers, two bytes each.
    assert count_kv_bytes(folder, "bfloat16") == 2 * 3 * 4096 * 2
    assert sum(path.stat().st_size for path in folder.iterdir()) < 5 << 20


def test_an_image_is_n_tokens_and_a_word_is_one(folder: Path) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    parts = [{"type": "image"}, {"type": "text", "text": draw_words(24, 5)}]
    prompt = processor.apply_chat_template([{"role": "user", "content": parts}])
    ids = processor.tokenizer(prompt)["input_ids"]
    assert ids.count(32000) == 1
    assert processor.tokenizer.unk_token_id not in ids
    text = [{"role": "user", "content": draw_words(64 + 24, 6)}]
    as_long = processor.tokenizer(processor.apply_chat_template(text))["input_ids"]
    assert len(as_long) == len(ids) - 1 + 64
    # Every id has a text, since dummy weights emit any.
    assert all(processor.tokenizer.convert_ids_to_tokens(list(range(32064))))


def test_the_scaled_tower_has_its_share_of_the_cost() -> None:
    """Of tower and prefill of an eighth, with 24 words, 85 % as Qwen3-VL-8B's."""
    shape = read_shape("scaled-qwen3-vl")
    sizes = {"vision_config": shape["vision"], "text_config": shape["text"]}
    config = AutoConfig.for_model("qwen3_vl", **sizes)
    tower = VisionTower.of_config(config).count_flops(962)
    prefill = (
        BackboneShape.of_checkpoint("scaled", config)
        .estimate_cost(962 // 8, text=24)
        .flops
    )
    attention = 2 * 2 * (4 * 962) ** 2 * config.vision_config.hidden_size * 4
    assert tower / (tower + prefill) == pytest.approx(0.85, abs=0.01)
    assert attention / tower == pytest.approx(0.68, abs=0.02)


@parametrize_from_file("log", "cause")
def test_the_root_cause_is_the_plugin_s_refusal_or_the_first_error(
    log: str, cause: str, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(log)
    error = ServerDied.diagnose(tmp_path / "log")
    assert error.problems[0].what == cause


# ---- peak memory ----


def test_peak_memory_is_beyond_weights_and_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tied weights and views of a cache are counted once; a layer may have several caches."""
    model = nn.Linear(8, 4, bias=False)
    model.register_buffer("tied", model.weight.detach().view(-1))
    cache = torch.zeros(100)
    worker = PeakMemory()
    caches = [cache[:50], cache[50:], [torch.zeros(3), torch.zeros(2)]]
    worker.model_runner = SimpleNamespace(get_model=lambda: model, kv_caches=caches)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert worker.read_peak_memory() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000)
    memory = worker.read_peak_memory()
    assert memory == {"peak": 1000, "weights": 4 * 32, "cache": 4 * 105}
    answers: list[tuple[int, Any]] = [
        (200, {"results": [memory, {**memory, "peak": 2000}]}),
        (200, {"results": [None]}),
        (404, {"detail": "Not Found"}),
    ]
    server: Any = SimpleNamespace(url="http://a", post=lambda *_: answers.pop(0))
    assert read_peak_memory(server) == 2000 - 128 - 420
    assert read_peak_memory(server) is None
    with pytest.raises(BenchmarkError, match="status 404"):
        read_peak_memory(server)
