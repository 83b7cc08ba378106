"""Cost of each way to serve a traffic, and the verdict on them."""

from __future__ import annotations

import pytest

from tests.tables import parametrize_from_file
from vllm_autoprune.advise import (
    Timings,
    Traffic,
    Way,
    estimate_ways,
    judge,
)
from vllm_autoprune.serving.api import layout

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


@parametrize_from_file("way", "new", "another")
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


@parametrize_from_file("traffic", "timings", "helps", "parts")
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


def test_too_wide_an_interval_is_no_verdict() -> None:
    prefills = (1.0, 0.001, 0.001, 1.0, 1.0)
    repeats = [TIMINGS.model_copy(update={"prefill": seconds}) for seconds in prefills]
    verdict = judge(TRAFFIC, estimate_ways(TRAFFIC, TIMINGS), repeats)
    assert verdict.helps is None and verdict.lines[0].startswith(
        "This probe does not tell"
    )
