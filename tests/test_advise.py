"""The cost model and its verdict: recorded figures, shared tokens in whole blocks, what is said."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from vllm_autoprune.advise import (
    NEVER,
    PARTS,
    Advantage,
    Estimate,
    Known,
    Timings,
    Traffic,
    Verdict,
    Way,
    align_core,
    complete,
    estimate_ways,
    fit_layers,
    judge,
    keep_known,
    shares_of,
    ttft_of,
)
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.serving.api import split as serving_split
from vllm_autoprune.serving.api.split import SplitImage

# docs/figures.md, "Full depth of LLaVA-NeXT-7B, composed": seconds of a layer on the prompts of
# both arms, and of all but the layers. The prompts have 3 text tokens before the image and 18
# behind it, and vLLM's 2928 visual tokens (2880, and a newline for each of 48 rows).
LAYER_FULL, LAYER_PRUNED, NOT_LAYERS = 6.5709, 0.8055, 12.494
TEXT_BEFORE, TEXT_BEHIND, N, K = 3, 18, 2928, 320
SELECTION = 0.070
# The same table: TTFT of the first question, and of another one as a share of it.
STOCK_FIRST, PRUNED_FIRST, PRUNED_ANOTHER, STOCK_ANOTHER = 222.98, 38.27, 0.59, 0.02


def recorded(core: int) -> dict[Way, Estimate]:
    text = TEXT_BEFORE + TEXT_BEHIND
    prefill, request = fit_layers(32, [(N + text, LAYER_FULL), (K + text, LAYER_PRUNED)])
    traffic = Traffic(16, N, K, core, TEXT_BEFORE, TEXT_BEHIND, answer=16, block=32)
    timings = Timings(
        tower=NOT_LAYERS - SELECTION, prefill=prefill, selection=SELECTION, request=request
    )
    return estimate_ways(traffic, timings)


def one_part(first: float, another: float) -> Estimate:
    """An estimate of two given times to first token."""
    return Estimate({"request": first}, {"request": another}, decoding=0.0)


def test_first_questions_are_as_measured() -> None:
    ways = recorded(256)
    assert ttft_of(ways["stock"].first) == pytest.approx(STOCK_FIRST, rel=0.01)
    assert ttft_of(ways["question-reading"].first) == pytest.approx(PRUNED_FIRST, rel=0.01)


def test_another_question_is_as_measured() -> None:
    """From layer times of first questions alone, within the measured 95 % intervals."""
    ways = recorded(256)
    assert 0.015 <= ways["stock"].ratio <= 0.025  # 0.02 (0.02 to 0.02)
    assert 0.51 <= ways["question-reading"].ratio <= 0.69  # 0.59 (0.51 to 0.69)


def test_break_even_is_about_eleven_questions() -> None:
    estimate = recorded(256)
    predicted = estimate["question-reading"].advantage(estimate["stock"])
    assert predicted.upper == pytest.approx(11, abs=2)
    stock = one_part(STOCK_FIRST, STOCK_ANOTHER * STOCK_FIRST)
    measured = one_part(PRUNED_FIRST, PRUNED_ANOTHER * PRUNED_FIRST)
    assert measured.advantage(stock).upper == pytest.approx(11.2, abs=0.1)


def test_a_split_is_as_projected() -> None:
    """Projections: another question 0.18 to 0.21 of the first, break-even at 55 to 83 questions."""
    estimate = recorded(256)
    assert 0.18 <= estimate["split"].ratio <= 0.21
    assert estimate["split"].advantage(estimate["stock"]).upper == pytest.approx(55, abs=3)
    stock = one_part(STOCK_FIRST, STOCK_ANOTHER * STOCK_FIRST)
    for ratio, questions in ((0.21, 53), (0.176, 83)):
        split = one_part(PRUNED_FIRST, ratio * PRUNED_FIRST)
        assert split.advantage(stock).upper == pytest.approx(questions, abs=2)


def test_a_core_of_half_the_budget_is_overtaken_early() -> None:
    estimate = recorded(160)
    assert estimate["split"].ratio > 0.35
    assert estimate["split"].advantage(estimate["stock"]).upper < 25


TRAFFIC = Traffic(4, tokens=640, budget=64, core=48, template=16, prompt=20, answer=11, block=32)
TIMINGS = Timings(
    tower=10.0, prefill=1.0, decode_image=2.0, processor=3.0, selection=5.0, request=7.0, decode=0.5
)
FIRST: dict[Way, tuple[float, ...]] = {
    "stock": (5, 10, 0, 7, 640, 36),
    "question-reading": (5, 10, 5, 7, 64, 36),
    "split": (5, 10, 10, 7, 64, 36),
    "question-free": (5, 10, 5, 7, 64, 36),
    "resized": (5, 1, 0, 7, 64, 36),
}
ANOTHER: dict[Way, tuple[float, ...]] = {
    "stock": (2, 0, 0, 7, 16, 20),  # 656 tokens are known, 640 of them in whole blocks
    "question-reading": (2, 0, 5, 7, 64, 36),
    "split": (2, 0, 5, 7, 16, 20),  # template and core end on a block edge
    "question-free": (2, 0, 0, 7, 16, 20),
    "resized": (2, 0, 0, 7, 16, 20),
}


@pytest.mark.parametrize("way", FIRST)
def test_parts_of_each_way(way: Way) -> None:
    estimate = estimate_ways(TRAFFIC, TIMINGS)[way]
    assert tuple(estimate.first.values()) == FIRST[way]
    assert tuple(estimate.another.values()) == ANOTHER[way]
    expected = sum(FIRST[way]) + 3 * sum(ANOTHER[way]) + 4 * 10 * 0.5
    assert estimate.total(4) == pytest.approx(expected)
    assert sum(shares_of(estimate.first).values()) == pytest.approx(1)
    assert tuple(shares_of(estimate.first)) == PARTS


def test_a_template_of_whole_blocks_is_known_to_first_questions() -> None:
    estimate = estimate_ways(replace(TRAFFIC, template=40), TIMINGS)["question-reading"]
    assert estimate.first["prefill of text"] == 8 + 20
    assert estimate.another["prefill of text"] == 8 + 20


@pytest.mark.parametrize("template", [0, 3, 16, 40])
@pytest.mark.parametrize("core", [1, 15, 33, 47, 63])
def test_a_core_is_aligned_as_it_is_served(template: int, core: int) -> None:
    traffic = replace(TRAFFIC, template=template, core=core)
    served = serving_split.align_core(template, SplitImage(traffic.budget, core, 0), traffic.block)
    assert align_core(traffic) == served
    split = estimate_ways(traffic, TIMINGS)["split"]
    assert split.another["prefill of the image"] == traffic.budget - served


def test_a_core_without_an_edge_of_a_block_is_no_split() -> None:
    ways = estimate_ways(replace(TRAFFIC, budget=12, core=8, template=0), TIMINGS)
    assert ways["split"].first == ways["question-reading"].first
    assert ways["split"].another == ways["question-reading"].another


def test_a_core_of_all_tokens_is_not_moved() -> None:
    assert align_core(replace(TRAFFIC, core=64, template=3)) == 64


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    ways = estimate_ways(replace(TRAFFIC, block=0), TIMINGS)
    for estimate in ways.values():
        assert estimate.another["prefill of the image"] == estimate.first["prefill of the image"]
    assert ways["question-reading"].advantage(ways["stock"]) == Advantage(1.0, math.inf)


@pytest.mark.parametrize(
    ("first", "another", "expected"),
    [
        (50, 20, Advantage(1.0, 6.0)),
        (50, 10, Advantage(1.0, math.inf)),
        (100, 20, NEVER),
        (100, 10, NEVER),
        (120, 5, Advantage(5.0, math.inf)),
    ],
)
def test_advantage_over_stock(first: float, another: float, expected: Advantage) -> None:
    stock, other = one_part(100, 10), one_part(first, another)
    advantage = other.advantage(stock)
    assert advantage == expected and advantage.never == (expected == NEVER)
    if math.isfinite(expected.upper) and not advantage.never:
        assert other.total(expected.upper) == pytest.approx(stock.total(expected.upper))


def test_layers_are_a_line() -> None:
    assert fit_layers(10, [(100, 0.25), (300, 0.45)]) == pytest.approx((0.01, 1.5))
    assert fit_layers(10, [(100, 0.25)]) == pytest.approx((0.025, 0.0))


def test_all_wrong_values_are_reported() -> None:
    wrong = replace(TRAFFIC, questions=0.5, tokens=8, core=65)
    with pytest.raises(ConfigError) as caught:
        estimate_ways(wrong, replace(TIMINGS, prefill=0.0))
    assert [problem.where for problem in caught.value.problems] == [
        "--questions", "--core", "--budget", "--prefill-ms-per-token"
    ]  # fmt: skip


KNOWN = keep_known(questions=2, tokens=640, tower=1.0, prefill=0.01)


def test_given_values_win_over_measured_ones() -> None:
    measured = keep_known("measured", tokens=900, tower=2.0, selection=0.5)
    known = KNOWN.filled_from(measured)
    assert known.values == {**measured.values, **KNOWN.values}
    assert known.notes == ("measured",)
    assert Known({"block": 0}).filled_from(Known({"block": 32})).values == {"block": 0}


def test_assumed_values_are_noted() -> None:
    traffic, timings, notes = complete(KNOWN)
    assert (traffic.budget, traffic.core) == (71, 53)
    assert timings.selection == 0.0
    text = "\n".join(notes)
    assert "K = 71" in text and "K_c = 53" in text
    assert "decode image, processor, selection, request, decode" in text


def test_all_missing_values_are_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        complete(Known({"tower": 1.0}))
    places = [problem.where for problem in caught.value.problems]
    assert places == ["--questions", "--tokens", "--prefill-ms-per-token"]


MANY_TOKENS = Traffic(
    2, tokens=2880, budget=320, core=256, template=0, prompt=20, answer=1, block=16
)
LARGE = Timings(tower=1.0, prefill=0.01, request=0.1)
"""Prefill of an image 28.8 s, its tower 1 s."""


def verdict(traffic: Traffic = MANY_TOKENS, timings: Timings = LARGE) -> Verdict:
    return judge(traffic, estimate_ways(traffic, timings))


def test_few_questions_on_large_images() -> None:
    result = verdict()
    assert result.helps and result.gain > 5
    assert "Pruning helps here" in result.lines[0]


def test_one_question_is_a_matter_of_accuracy() -> None:
    result = verdict(replace(MANY_TOKENS, questions=1))
    assert any("choose by accuracy" in line for line in result.lines)


def test_beyond_the_break_even_only_a_question_free_state_pays() -> None:
    result = verdict(replace(MANY_TOKENS, questions=60))
    text = "\n".join(result.lines)
    assert result.helps and "Only a question-free state pays" in text
    assert "question-reading: " in text and "and you have 60" in text


def test_many_questions_are_served_by_the_prefix_cache() -> None:
    result = verdict(replace(MANY_TOKENS, questions=5000))
    text = "\n".join(result.lines)
    assert not result.helps and result.lines[0] == "Pruning will not help you here."
    assert "finds it in its prefix cache" in text


def test_a_slow_front_end_is_named() -> None:
    result = verdict(timings=replace(LARGE, prefill=1e-6, decode_image=5.0))
    text = "\n".join(result.lines)
    assert not result.helps and "is front end: have clients send smaller images" in text


def test_a_slow_tower_asks_for_resizing() -> None:
    timings = Timings(tower=1.0, prefill=1e-5)
    result = verdict(replace(MANY_TOKENS, questions=1), timings)
    text = "\n".join(result.lines)
    assert not result.helps and "max_pixels" in text
    assert "Resizing images to 320 tokens" in text


def test_a_server_with_little_work_asks_for_larger_batches() -> None:
    result = verdict(timings=Timings(tower=0.001, prefill=1e-6, request=1.0))
    assert not result.helps and "serve more requests at once" in "\n".join(result.lines)


def test_long_answers_are_named() -> None:
    result = verdict(replace(MANY_TOKENS, answer=1000), replace(LARGE, prefill=1e-4, decode=0.1))
    assert not result.helps and "is decoding: answer shorter" in "\n".join(result.lines)


def test_a_budget_of_all_tokens_prunes_nothing() -> None:
    result = verdict(replace(MANY_TOKENS, budget=2880))
    assert not result.helps and result.gain == 1
    assert "keeps every token" in result.lines[1]


def test_the_tower_that_remains_is_named() -> None:
    result = verdict(timings=replace(LARGE, tower=20.0))
    assert result.helps
    assert any("is vision tower, which no budget shortens" in line for line in result.lines)


def test_a_core_is_moved_to_the_edge_of_a_block() -> None:
    text = "\n".join(verdict(replace(MANY_TOKENS, template=3)).lines)
    assert "served with 253 tokens instead of 256" in text
    assert not any("core is served" in line for line in verdict().lines)


def test_an_image_that_is_not_split() -> None:
    text = "\n".join(verdict(replace(MANY_TOKENS, budget=10, core=8)).lines)
    assert "are not split, because no KV block ends within them" in text
    text = "\n".join(verdict(replace(MANY_TOKENS, block=0)).lines)
    assert "are not split, because there is no prefix cache" in text
