"""Engines that share KV blocks, or outputs of the vision encoder, through vLLM's connectors."""

from __future__ import annotations

import pytest

from tests.serving.runners import Runner
from tests.serving.scenarios.connectors import VARIANTS

pytestmark = pytest.mark.engine

BLOCK = 32


@pytest.mark.scenarios("shared_kv")
def test_a_second_engine_takes_pruned_kv_of_the_first(runner: Runner) -> None:
    report = runner.run("shared_kv")
    loaded = 0
    for stored, taken, alone in zip(
        report["first"], report["second"], report["alone"], strict=True
    ):
        assert taken["text"] == stored["text"] == alone["text"]
        assert taken["logprob"] == pytest.approx(alone["logprob"], abs=1e-3)
        assert taken["cached"] == (taken["prompt_tokens"] - 1) // BLOCK * BLOCK
        loaded += taken["cached"] - stored["cached"]
    assert report["hits"] == loaded > 0


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.scenarios("shared_kv")
def test_kv_of_another_request_is_never_taken(runner: Runner, name: str) -> None:
    """The token ids of the prompts are equal; question, state or control differ."""
    report = runner.run("shared_kv")
    answer, alone = report["variants"][name], report["variants_alone"][name]
    assert answer["prompt_tokens"] == report["first"][0]["prompt_tokens"]
    assert answer["cached"] == 0
    assert answer["text"] == alone["text"]
    assert answer["logprob"] == pytest.approx(alone["logprob"], abs=1e-3)


@pytest.mark.scenarios("shared_kv", "shared_kv_without_the_question")
def test_negative_control_without_the_question_in_the_identity(runner: Runner) -> None:
    wrong = runner.run("shared_kv_without_the_question")["question"]
    right = runner.run("shared_kv")["variants"]["question"]
    assert wrong["cached"] > 0
    assert wrong["text"] != right["text"] or wrong["logprob"] != pytest.approx(right["logprob"])


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
@pytest.mark.scenarios("shared_encoder")
def test_images_encoded_by_another_engine(runner: Runner) -> None:
    """By V1 alone: in vLLM 0.32, V2 runs the language model of an encoding engine on meta."""
    report = runner.run("shared_encoder")
    assert report["encoded"] == 1
    assert report["runs"] == 0
    assert len(report["answers"]) > 2
    for found, alone in zip(report["answers"], report["alone"], strict=True):
        assert found["text"] == alone["text"]
        assert found["logprob"] == pytest.approx(alone["logprob"], abs=1e-3)
