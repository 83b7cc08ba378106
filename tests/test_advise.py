"""The cost model and its verdict: recorded figures, shared tokens in whole blocks, what is said."""

from __future__ import annotations

import math

import pytest

from vllm_autoprune.advise import (
    NEVER,
    PARTS,
    Advantage,
    Estimate,
    Known,
    Timings,
    Traffic,
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
    traffic = Traffic(
        questions=16, tokens=N, budget=K, core=core, template=TEXT_BEFORE, prompt=TEXT_BEHIND,
        answer=16, block=32,
    )  # fmt: skip
    timings = Timings(
        tower=NOT_LAYERS - SELECTION, prefill=prefill, selection=SELECTION, request=request
    )
    return estimate_ways(traffic, timings)


def of_times(new: float, known: float) -> Estimate:
    """An estimate of two times to first token."""
    return Estimate({"request": new}, {"request": known}, decoding=0.0)


def test_questions_and_break_even_are_as_measured() -> None:
    """From layer times of first questions alone, within the measured 95 % intervals."""
    ways = recorded(256)
    stock, reading = ways["stock"], ways["question-reading"]
    assert ttft_of(stock.first_question) == pytest.approx(STOCK_FIRST, rel=0.01)
    assert ttft_of(reading.first_question) == pytest.approx(PRUNED_FIRST, rel=0.01)
    assert 0.015 <= stock.ratio <= 0.025  # 0.02 (0.02 to 0.02)
    assert 0.51 <= reading.ratio <= 0.69  # 0.59 (0.51 to 0.69)
    assert reading.advantage(stock).upper == pytest.approx(11, abs=2)


def test_a_split_is_as_projected() -> None:
    """Projections: another question 0.18 to 0.21 of the first, break-even at 55 to 83 questions."""
    ways = recorded(256)
    assert 0.18 <= ways["split"].ratio <= 0.21
    assert ways["split"].advantage(ways["stock"]).upper == pytest.approx(55, abs=3)
    stock = of_times(STOCK_FIRST, STOCK_ANOTHER * STOCK_FIRST)
    for ratio, questions in ((PRUNED_ANOTHER, 11.2), (0.21, 53), (0.176, 83)):
        measured = of_times(PRUNED_FIRST, ratio * PRUNED_FIRST)
        assert measured.advantage(stock).upper == pytest.approx(questions, abs=2)
    half = recorded(160)
    assert half["split"].ratio > 0.35 and half["split"].advantage(half["stock"]).upper < 25


TRAFFIC = Traffic(
    questions=4, tokens=640, budget=64, core=48, template=16, prompt=20, answer=11, block=32
)
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


def changed(**fields: float) -> Traffic:
    return TRAFFIC.model_copy(update=fields)


@pytest.mark.parametrize("way", FIRST)
def test_parts_of_each_way(way: Way) -> None:
    estimate = estimate_ways(TRAFFIC, TIMINGS)[way]
    assert tuple(estimate.first_question.values()) == FIRST[way]
    assert tuple(estimate.another_question.values()) == ANOTHER[way]
    expected = sum(FIRST[way]) + 3 * sum(ANOTHER[way]) + 4 * 10 * 0.5
    assert estimate.total(4) == pytest.approx(expected)
    assert sum(shares_of(estimate.first_question).values()) == pytest.approx(1)
    assert tuple(shares_of(estimate.first_question)) == PARTS


def test_whole_blocks_are_shared() -> None:
    reading = estimate_ways(changed(template=40), TIMINGS)["question-reading"]
    for question in (reading.first_question, reading.another_question):
        assert question["prefill of text"] == 8 + 20
    # A core without an edge of a block is no split.
    ways = estimate_ways(changed(budget=12, core=8, template=0), TIMINGS)
    assert ways["split"] == ways["question-reading"]
    uncached = estimate_ways(changed(block=0), TIMINGS)
    for estimate in uncached.values():
        first_question, another = estimate.first_question, estimate.another_question
        assert another["prefill of the image"] == first_question["prefill of the image"]
    assert uncached["question-reading"].advantage(uncached["stock"]) == Advantage(1.0, math.inf)


@pytest.mark.parametrize("template", [0, 3, 16, 40])
@pytest.mark.parametrize("core", [1, 15, 33, 47, 63])
def test_a_core_is_aligned_as_it_is_served(template: int, core: int) -> None:
    traffic = changed(template=template, core=core)
    served = serving_split.align_core(template, SplitImage(traffic.budget, core, 0), traffic.block)
    assert align_core(traffic) == served
    assert align_core(changed(template=template, core=64)) == 64, "all tokens"


@pytest.mark.parametrize(
    ("new", "known", "expected"),
    [
        (50, 20, Advantage(1.0, 6.0)),
        (50, 10, Advantage(1.0, math.inf)),
        (100, 20, NEVER),
        (100, 10, NEVER),
        (120, 5, Advantage(5.0, math.inf)),
    ],
)
def test_advantage_over_stock(new: float, known: float, expected: Advantage) -> None:
    stock, other = of_times(100, 10), of_times(new, known)
    assert other.advantage(stock) == expected
    if math.isfinite(expected.upper) and expected != NEVER:
        assert other.total(expected.upper) == pytest.approx(stock.total(expected.upper))


def test_layers_are_a_line() -> None:
    assert fit_layers(10, [(100, 0.25), (300, 0.45)]) == pytest.approx((0.01, 1.5))
    assert fit_layers(10, [(100, 0.25)]) == pytest.approx((0.025, 0.0))


def test_values_known_win_over_those_measured_and_assumed_ones_are_noted() -> None:
    known = keep_known(questions=2, tokens=640, tower=1.0, prefill=0.01, core=None)
    measured = keep_known("measured", tokens=900, tower=2.0, block=0)
    filled = known.filled_from(measured)
    assert filled == Known({**measured.values, **known.values}, ("measured",))
    completed = complete(filled)
    assert (completed.values["budget"], completed.values["core"]) == (71, 53)
    text = "\n".join(completed.notes)
    assert "K = 71" in text and "K_c = 53" in text
    assert "decode image, processor, selection, request, decode" in text


MANY_TOKENS = Traffic(
    questions=2, tokens=2880, budget=320, core=256, template=0, prompt=20, answer=1
)
LARGE = Timings(tower=1.0, prefill=0.01, request=0.1)
"""Prefill of an image 28.8 s, its tower 1 s."""


@pytest.mark.parametrize(
    ("traffic", "timings", "helps", "said"),
    [
        ({}, {}, True, ["Pruning helps here"]),
        ({"questions": 1}, {}, True, ["choose by accuracy"]),
        ({"questions": 60}, {}, True,
         ["Only a question-free state pays", "question-reading: ", "and you have 60"]),
        ({"questions": 5000}, {}, False,
         ["Pruning will not help you here.", "finds it in its prefix cache"]),
        ({}, {"prefill": 1e-6, "decode_image": 5.0}, False,
         ["is front end: have clients send smaller images"]),
        ({"questions": 1}, {"prefill": 1e-5, "request": 0.0}, False,
         ["max_pixels", "Resizing images to 320 tokens"]),
        ({}, {"tower": 0.001, "prefill": 1e-6, "request": 1.0}, False,
         ["serve more requests at once"]),
        ({"answer": 1000}, {"prefill": 1e-4, "decode": 0.1}, False,
         ["is decoding: answer shorter"]),
        ({"budget": 2880}, {}, False, ["keeps every token"]),
        ({}, {"tower": 20.0}, True, ["is vision tower, which no budget shortens"]),
        ({"template": 3}, {}, True, ["served with 253 tokens instead of 256"]),
        ({"budget": 10, "core": 8}, {}, True,
         ["are not split, because no KV block ends within them"]),
        ({"block": 0}, {}, True, ["are not split, because there is no prefix cache"]),
    ],
)  # fmt: skip
def test_the_verdict(
    traffic: dict[str, float], timings: dict[str, float], helps: bool, said: list[str]
) -> None:
    sizes = MANY_TOKENS.model_copy(update=traffic)
    verdict = judge(sizes, estimate_ways(sizes, LARGE.model_copy(update=timings)))
    text = "\n".join(verdict.lines)
    assert verdict.helps == helps == text.startswith("Pruning helps here")
    assert [words for words in said if words not in text] == []
    assert ("instead of 256" in text) == ("template" in traffic)
