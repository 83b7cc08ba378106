"""The verdict: when pruning helps, when not and why, and what would."""

from __future__ import annotations

from dataclasses import replace

from vllm_autoprune.advice.model import Timings, Traffic, estimate_ways
from vllm_autoprune.advice.verdict import Verdict, judge

TRAFFIC = Traffic(2, tokens=2880, budget=320, core=256, template=0, prompt=20, answer=1, block=16)
LARGE = Timings(tower=1.0, prefill=0.01, request=0.1)
"""Prefill of an image 28.8 s, its tower 1 s."""


def verdict(traffic: Traffic = TRAFFIC, timings: Timings = LARGE) -> Verdict:
    return judge(traffic, estimate_ways(traffic, timings))


def test_few_questions_on_large_images() -> None:
    result = verdict()
    assert result.helps and result.gain > 5
    assert "Pruning helps here" in result.lines[0]


def test_one_question_is_a_matter_of_accuracy() -> None:
    result = verdict(replace(TRAFFIC, questions=1))
    assert any("choose by accuracy" in line for line in result.lines)


def test_beyond_the_break_even_only_a_question_free_state_pays() -> None:
    result = verdict(replace(TRAFFIC, questions=60))
    text = "\n".join(result.lines)
    assert result.helps and "Only a question-free state pays" in text
    assert "question-reading: " in text and "and you have 60" in text


def test_many_questions_are_served_by_the_prefix_cache() -> None:
    result = verdict(replace(TRAFFIC, questions=5000))
    text = "\n".join(result.lines)
    assert not result.helps and result.lines[0] == "Pruning will not help you here."
    assert "finds it in its prefix cache" in text


def test_a_slow_front_end_is_named() -> None:
    result = verdict(timings=replace(LARGE, prefill=1e-6, decode_image=5.0))
    text = "\n".join(result.lines)
    assert not result.helps and "is front end: have clients send smaller images" in text


def test_a_slow_tower_asks_for_resizing() -> None:
    timings = Timings(tower=1.0, prefill=1e-5)
    result = verdict(replace(TRAFFIC, questions=1), timings)
    text = "\n".join(result.lines)
    assert not result.helps and "max_pixels" in text
    assert "Resizing images to 320 tokens" in text


def test_a_server_with_little_work_asks_for_larger_batches() -> None:
    result = verdict(timings=Timings(tower=0.001, prefill=1e-6, request=1.0))
    assert not result.helps and "serve more requests at once" in "\n".join(result.lines)


def test_long_answers_are_named() -> None:
    result = verdict(replace(TRAFFIC, answer=1000), replace(LARGE, prefill=1e-4, decode=0.1))
    assert not result.helps and "is decoding: answer shorter" in "\n".join(result.lines)


def test_a_budget_of_all_tokens_prunes_nothing() -> None:
    result = verdict(replace(TRAFFIC, budget=2880))
    assert not result.helps and result.gain == 1
    assert "keeps every token" in result.lines[1]


def test_the_tower_that_remains_is_named() -> None:
    result = verdict(timings=replace(LARGE, tower=20.0))
    assert result.helps
    assert any("is vision tower, which no budget shortens" in line for line in result.lines)


def test_a_core_is_moved_to_the_edge_of_a_block() -> None:
    text = "\n".join(verdict(replace(TRAFFIC, template=3)).lines)
    assert "served with 253 tokens instead of 256" in text
    assert not any("core is served" in line for line in verdict().lines)


def test_an_image_that_is_not_split() -> None:
    text = "\n".join(verdict(replace(TRAFFIC, budget=10, core=8)).lines)
    assert "are not split, because no KV block ends within them" in text
    text = "\n".join(verdict(replace(TRAFFIC, block=0)).lines)
    assert "are not split, because there is no prefix cache" in text
