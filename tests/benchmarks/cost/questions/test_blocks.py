"""Predicted KV blocks of questions on one image, and verdicts on counted ones."""

from __future__ import annotations

import pytest

from benchmarks.cost.questions.arms import FREE, SPLIT, STOCK, TODAY
from benchmarks.cost.questions.blocks import (
    AT_ONCE,
    EngineCounts,
    build_section,
    count_shared_tokens,
    predict_blocks,
)

PROMPTS = {STOCK: 2948, TODAY: 340, SPLIT: 340, FREE: 340}


def count(arm: str, *, shared: int) -> EngineCounts:
    blocks = tuple(predict_blocks(shared, PROMPTS[arm], questions) for questions in AT_ONCE)
    return EngineCounts(before=2, prompt_tokens=PROMPTS[arm], blocks=blocks)


@pytest.mark.parametrize(
    ("shared", "prompt", "questions", "blocks"),
    [(0, 325, 1, 11), (0, 325, 16, 176), (256, 325, 16, 8 + 16 * 3), (255, 325, 2, 7 + 2 * 4)],
)
def test_full_shared_blocks_are_held_once(
    shared: int, prompt: int, questions: int, blocks: int
) -> None:
    assert predict_blocks(shared, prompt, questions) == blocks


def test_arms_share_the_image_the_core_or_the_template() -> None:
    shared = {
        arm: count_shared_tokens(arm, count(arm, shared=0), 0.8)
        for arm in (STOCK, TODAY, SPLIT, FREE)
    }

    # The core of 256 tokens behind 2 of the template is moved to the edge of a block.
    assert shared == {STOCK: 2930, TODAY: 2, SPLIT: 256, FREE: 322}


def test_the_split_holds_less_than_half_and_differing_counts_are_shown() -> None:
    counts = {
        STOCK: count(STOCK, shared=2930),
        TODAY: count(TODAY, shared=2),
        SPLIT: count(SPLIT, shared=256),
        FREE: count(FREE, shared=322),
    }
    section = build_section(counts, 0.8)

    assert [claim.verdict for claim in section.claims] == ["holds", "holds"]
    assert section.claims[0].measured == "3.14 times"
    assert "predicted" not in section.tables[0].markdown()

    # Without sharing, the split holds as much as today's state.
    counts[SPLIT] = count(SPLIT, shared=0)
    section = build_section(counts, 0.8)

    assert [claim.verdict for claim in section.claims] == ["does not hold", "does not hold"]
    assert "176 (predicted 56)" in section.tables[0].markdown()
