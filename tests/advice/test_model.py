"""The cost model reproduces recorded figures and counts shared tokens in whole blocks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from vllm_autoprune.advice.model import (
    NEVER,
    PART_NAMES,
    Advantage,
    Estimate,
    Parts,
    Timings,
    Traffic,
    Way,
    aligned_core,
    estimate_ways,
    fit_layers,
)
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.serving.api.image_split import SplitImage, align_core

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


def one_part(first: float, another: float, way: Way = "split") -> Estimate:
    """An estimate of two given times to first token."""
    only_request = [Parts(0.0, 0.0, 0.0, seconds, 0.0, 0.0) for seconds in (first, another)]
    return Estimate(way, only_request[0], only_request[1], decoding=0.0)


def test_first_questions_are_as_measured() -> None:
    ways = recorded(256)
    assert ways["stock"].first.ttft == pytest.approx(STOCK_FIRST, rel=0.01)
    assert ways["question-reading"].first.ttft == pytest.approx(PRUNED_FIRST, rel=0.01)


def test_another_question_is_as_measured() -> None:
    """From layer times of first questions alone, within the measured 95 % intervals."""
    ways = recorded(256)
    assert 0.015 <= ways["stock"].ratio <= 0.025  # 0.02 (0.02 to 0.02)
    assert 0.51 <= ways["question-reading"].ratio <= 0.69  # 0.59 (0.51 to 0.69)


def test_break_even_is_about_eleven_questions() -> None:
    estimate = recorded(256)
    predicted = estimate["question-reading"].advantage(estimate["stock"])
    assert predicted.upper == pytest.approx(11, abs=2)
    stock = one_part(STOCK_FIRST, STOCK_ANOTHER * STOCK_FIRST, "stock")
    measured = one_part(PRUNED_FIRST, PRUNED_ANOTHER * PRUNED_FIRST, "question-reading")
    assert measured.advantage(stock).upper == pytest.approx(11.2, abs=0.1)


def test_a_split_is_as_projected() -> None:
    """Projections: another question 0.18 to 0.21 of the first, break-even at 55 to 83 questions."""
    estimate = recorded(256)
    assert 0.18 <= estimate["split"].ratio <= 0.21
    assert estimate["split"].advantage(estimate["stock"]).upper == pytest.approx(55, abs=3)
    stock = one_part(STOCK_FIRST, STOCK_ANOTHER * STOCK_FIRST, "stock")
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
    assert tuple(estimate.first.seconds().values()) == FIRST[way]
    assert tuple(estimate.another.seconds().values()) == ANOTHER[way]
    expected = sum(FIRST[way]) + 3 * sum(ANOTHER[way]) + 4 * 10 * 0.5
    assert estimate.total(4) == pytest.approx(expected)
    assert sum(estimate.first.shares().values()) == pytest.approx(1)
    assert tuple(estimate.first.shares()) == PART_NAMES


def test_a_template_of_whole_blocks_is_known_to_first_questions() -> None:
    estimate = estimate_ways(replace(TRAFFIC, template=40), TIMINGS)["question-reading"]
    assert estimate.first.text_prefill == 8 + 20
    assert estimate.another.text_prefill == 8 + 20


@pytest.mark.parametrize("template", [0, 3, 16, 40])
@pytest.mark.parametrize("core", [1, 15, 33, 47, 63])
def test_a_core_is_aligned_as_it_is_served(template: int, core: int) -> None:
    traffic = replace(TRAFFIC, template=template, core=core)
    served = align_core(template, SplitImage(traffic.budget, core, 0), traffic.block)
    assert aligned_core(traffic) == served
    split = estimate_ways(traffic, TIMINGS)["split"]
    assert split.another.image_prefill == traffic.budget - served


def test_a_core_without_an_edge_of_a_block_is_no_split() -> None:
    ways = estimate_ways(replace(TRAFFIC, budget=12, core=8, template=0), TIMINGS)
    assert ways["split"].first == ways["question-reading"].first
    assert ways["split"].another == ways["question-reading"].another


def test_a_core_of_all_tokens_is_not_moved() -> None:
    assert aligned_core(replace(TRAFFIC, core=64, template=3)) == 64


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    ways = estimate_ways(replace(TRAFFIC, block=0), TIMINGS)
    for estimate in ways.values():
        assert estimate.another.image_prefill == estimate.first.image_prefill
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
    stock, other = one_part(100, 10, "stock"), one_part(first, another)
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
