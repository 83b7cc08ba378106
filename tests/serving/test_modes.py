"""Modes that operators run: answers about pruned images are those of an engine without them."""

from __future__ import annotations

import pytest

from tests.serving.runners import Runner

pytestmark = pytest.mark.engine

BLOCK = 32


@pytest.mark.scenarios("plain_mode")
def test_mixed_requests_are_answered_together_as_alone(runner: Runner) -> None:
    report = runner.run("plain_mode")
    assert report["together"] == report["alone"]
    assert len({str(answer) for answer in report["together"]}) == len(report["together"])


@pytest.mark.exhaustive
@pytest.mark.scenarios("plain_mode")
@pytest.mark.parametrize("name", ["ngram_mode", "draft_model_mode"])
def test_speculative_decoding(runner: Runner, name: str) -> None:
    # Each in a process of its own: vLLM looks for n-grams with numba, and starts no second CPU
    # engine in a process that has loaded it.
    report = runner.run(name, {"SCENARIO": name})
    plain = runner.run("plain_mode")["together"]
    assert report["together"] == report["alone"] == plain
    assert report["draft"] > report["accepted"] > 0


@pytest.mark.exhaustive
@pytest.mark.scenarios("plain_mode", "pipeline_mode")
def test_pipeline_ranks(runner: Runner) -> None:
    report = runner.run("pipeline_mode")
    plain = runner.run("plain_mode")["together"]
    assert report["together"] == report["alone"] == plain
    assert report["layers"] == [3, 3]


@pytest.mark.scenarios("plain_mode", "shared_memory_mode")
def test_processor_cache_in_shared_memory(runner: Runner) -> None:
    report = runner.run("shared_memory_mode")
    plain = runner.run("plain_mode")["together"]
    assert report["together"] == report["alone"] == plain


@pytest.mark.scenarios("priority_mode")
def test_priority_scheduling_with_preemption(runner: Runner) -> None:
    report = runner.run("priority_mode")
    assert report["together"] == report["alone"]
    assert report["preempted"] >= 1
    # A small number goes first: 9 ran before 4, 5 and 6 came, and made room for them.
    assert report["order"][-1] == 9
    assert [one for one in report["order"] if one < 7] == [4, 5, 6]


@pytest.mark.scenarios("sampled_mode")
def test_several_samples_and_structured_output(runner: Runner) -> None:
    report = runner.run("sampled_mode")
    first, second = report["samples"]
    assert len(first) == 3 and first == second
    assert len(set(first)) > 1
    assert report["choices"][0] in ("red", "blue")
    first_digit, second_digit = report["pattern"][0].split()
    assert first_digit in "123" and second_digit in "456"
    assert report["runs"] == 1, "the vision tower runs once for all of them"


@pytest.mark.scenarios("sampled_mode")
def test_sleep_and_wake_with_a_text_tower(runner: Runner) -> None:
    report = runner.run("sampled_mode")["sleep"]
    assert report["before"] == report["after 0"] == report["after 1"] == report["after 2"]
    assert report["refused 0"] == report["refused 1"] == ""
    assert "--autoprune-text-tower" in report["refused 2"]
    # Level 1 empties vLLM's caches of images, and the features with them.
    assert [report[f"runs {level}"] for level in (0, 1, 2)] == [0, 1, 0]


@pytest.mark.scenarios("lora_mode")
def test_adapters_of_the_language_model(runner: Runner) -> None:
    report = runner.run("lora_mode")
    assert report["together"] == report["alone"]
    none, first, second = (report["together"][at::3] for at in range(3))
    assert [first, second] == report["merged"]
    assert none != first and first != second and second != none
    assert report["runs"] == 1, "adapters share the features of an image"


@pytest.mark.scenarios("plain_mode", "lora_mode")
def test_requests_without_an_adapter_are_not_changed_by_those_with_one(runner: Runner) -> None:
    from tests.serving.scenarios.modes import REQUESTS

    plain = runner.run("plain_mode")["together"]
    expected = [
        answer
        for answer, key in zip(plain, REQUESTS, strict=True)
        if key[2] is None or "core" in key[2]
    ]
    assert runner.run("lora_mode")["together"][::3] == expected


@pytest.mark.scenarios("lora_mode")
def test_adapters_share_no_kv(runner: Runner) -> None:
    assert runner.run("lora_mode")["cached"] == [0, 0, 0, BLOCK, BLOCK, BLOCK]


@pytest.mark.scenarios("plain_mode", "prompt_embeds_mode")
def test_prompt_embeddings_beside_images(runner: Runner) -> None:
    report = runner.run("prompt_embeds_mode")
    assert report["together"] == runner.run("plain_mode")["together"]
    alone, as_text = report["embedded"]
    assert report["after"] == alone == as_text


@pytest.mark.scenarios("prompt_embeds_mode")
def test_prompt_embeddings_within_a_message(runner: Runner) -> None:
    report = runner.run("prompt_embeds_mode")
    assert report["counted"] == 3
    embedded, text, others = report["beside"]
    assert embedded == text != others


@pytest.mark.scenarios("prompt_embeds_mode")
def test_image_embeddings_are_served_unpruned(runner: Runner) -> None:
    whole, given = runner.run("prompt_embeds_mode")["unpruned"]
    assert given == whole
