"""The evaluation compares resizing and selections at the same number of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.minillava.split import Example
from benchmarks.miniqwen.evaluate import (
    ORACLE,
    RANDOM,
    RESIZED,
    build_report,
    evaluate,
    format_report,
    keep_evidence,
    keep_random,
)
from benchmarks.miniqwen.reader import Reader
from benchmarks.miniqwen.split import draw_examples, image_size


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return draw_examples("test", 2)


def test_selections_keep_distinct_tokens_and_the_oracle_the_evidence(
    examples: list[Example],
) -> None:
    for count, budget in ((54, 6), (54, 54)):
        for row in keep_random(examples, count, budget).tolist():
            assert len(set(row)) == budget and row == sorted(row)
    for one, row in zip(examples, keep_evidence(examples, 200, 40).tolist(), strict=True):
        assert set(one.evidence) <= set(row) and len(row) == 40


def test_every_case_has_at_most_the_tokens_of_its_budget(
    checkpoint: Path, examples: list[Example]
) -> None:
    results = evaluate(Reader(checkpoint), examples, divisors=(4,))
    for case in (RESIZED, RANDOM, ORACLE):
        tokens = results[f"{case} 4"].tokens
        for one, used in zip(examples, tokens, strict=True):
            budget = image_size(one.image).tokens // 4
            assert used <= budget if case == RESIZED else used == budget
    report = build_report(examples, results)
    assert report["questions"] == len(examples)
    text = format_report(report)
    assert all(f"| {label} |" in text for label in results)
