"""Prepared workloads: request bodies, reuse, incomplete folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common import BenchmarkError
from benchmarks.load.prepared_requests import BODIES, load_prepared, prepare
from tests.benchmarks.load.samples import WORKLOAD


def test_bodies_are_streamed_chat_requests(tmp_path: Path) -> None:
    prepared = prepare(WORKLOAD, tmp_path / "w")
    assert (len(prepared.measured), len(prepared.warm_up)) == (8, 2)
    body = json.loads(prepared.body(prepared.measured[3]))
    picture, question = body["messages"][0]["content"]
    assert picture["image_url"]["url"].startswith("data:image/")
    assert question == {"type": "text", "text": prepared.measured[3].ask.question}
    assert (body["model"], body["max_tokens"]) == ("mock", 4)
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    assert body["ignore_eos"] is True


def test_the_openai_dialect_omits_vllm_fields(tmp_path: Path) -> None:
    prepared = prepare(WORKLOAD.model_copy(update={"dialect": "openai"}), tmp_path)
    assert (
        not {"ignore_eos", "skip_special_tokens"}
        & json.loads(prepared.body(prepared.lines[0])).keys()
    )


def test_equal_settings_give_equal_bytes(tmp_path: Path) -> None:
    one, other = prepare(WORKLOAD, tmp_path / "one"), prepare(WORKLOAD, tmp_path / "other")
    assert one.digest == other.digest
    seeded = prepare(WORKLOAD.model_copy(update={"seed": 1}), tmp_path / "one")
    assert seeded.digest != one.digest


def test_a_prepared_folder_is_reused(tmp_path: Path) -> None:
    prepare(WORKLOAD, tmp_path)
    before = (tmp_path / BODIES).stat().st_mtime_ns
    prepare(WORKLOAD, tmp_path)
    assert (tmp_path / BODIES).stat().st_mtime_ns == before


def test_an_incomplete_folder_is_refused_and_prepared_again(tmp_path: Path) -> None:
    digest = prepare(WORKLOAD, tmp_path).digest
    (tmp_path / BODIES).write_bytes((tmp_path / BODIES).read_bytes()[:-10])
    with pytest.raises(BenchmarkError, match="incomplete"):
        load_prepared(tmp_path)
    assert prepare(WORKLOAD, tmp_path).digest == digest


def test_a_missing_folder_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"python -m benchmarks\.load prepare"):
        load_prepared(tmp_path / "nowhere")
