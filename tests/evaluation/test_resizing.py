"""Verdicts on pruning against the resize control."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.evaluation.samples import FULL, SETUP, case
from vllm_autoprune.evaluation.journal import Contents
from vllm_autoprune.evaluation.pages import as_markdown
from vllm_autoprune.evaluation.records import MME, Answer, Case, Question
from vllm_autoprune.evaluation.report import Report, build_report
from vllm_autoprune.evaluation.resizing import Comparison, find_winner
from vllm_autoprune.statistics import Estimate

IMAGES = 8
QUESTIONS = tuple(
    Question(id=f"{kind} {image}", benchmark=kind, image=str(image))
    for image in range(IMAGES)
    for kind in ("read", "count")
)
CONTROL = case("resized@8", "resized")
BASE = case("cdpruner@8")
STATE = case("mine@8", "found", base="cdpruner@8")


def scores(read: float, count: float) -> list[float]:
    return [read, count] * IMAGES


def report_of(
    *cases: tuple[Case, Sequence[float]], questions: Sequence[Question] = QUESTIONS
) -> Report:
    given = [
        Answer(case=one.name, question=question.id, score=score)
        for one, values in cases
        for question, score in zip(questions, values, strict=True)
    ]
    return build_report(Contents([SETUP, *(one for one, _ in cases), *questions, *given]))


def compared(report: Report, name: str, kind: str | None = None) -> Comparison:
    (found,) = [one for one in report.resizing if (one.case, one.kind) == (name, kind)]
    return found


def test_one_line_says_who_wins_overall_and_by_kind() -> None:
    full, control = (FULL, scores(1, 1)), (CONTROL, scores(0, 1))
    mixed = [1.0, 0.0] * (IMAGES // 2) + [1.0, 1.0] * (IMAGES // 2)
    page = as_markdown(report_of(full, control, (STATE, mixed)))
    (line,) = [line for line in page.splitlines() if line.startswith("- mine")]
    assert line.startswith("- mine, K = 8: pruning beats resizing, +25.0 (")
    assert "pruning wins: read +100.0 (+100.0 to +100.0); resizing wins: count -50.0 (" in line


def test_differences_are_paired_and_by_kind() -> None:
    report = report_of((FULL, scores(1, 1)), (CONTROL, scores(1, 0)), (STATE, scores(1, 1)))
    overall = compared(report, "mine@8")
    assert overall.difference == Estimate(50.0, 50.0, 50.0)
    assert (overall.questions, overall.images, overall.winner) == (16, 8, "pruning")
    assert compared(report, "mine@8", "count").difference.value == 100.0
    same = compared(report, "mine@8", "read")
    assert (same.difference.value, same.winner, same.questions) == (0.0, "not decided", 8)


def test_only_states_that_are_not_compared_with_get_a_line() -> None:
    cases = [(FULL, scores(1, 1)), (CONTROL, scores(0, 0)), (BASE, scores(0, 0))]
    assert "- cdpruner, K = 8: not decided" in as_markdown(report_of(*cases))
    page = as_markdown(report_of(*cases, (STATE, scores(0, 0))))
    assert "- mine, K = 8" in page and "- cdpruner, K = 8" not in page
    assert "| cdpruner |" in page[page.index("## Less the resize control by kind") :]


def test_a_single_kind_is_not_repeated() -> None:
    questions = [one for one in QUESTIONS if one.benchmark == "read"]
    right, wrong = [1.0] * IMAGES, [0.0] * IMAGES
    report = report_of((FULL, right), (CONTROL, wrong), (STATE, right), questions=questions)
    assert [one.kind for one in report.resizing] == [None]
    assert "By kind" not in as_markdown(report)


def test_pairs_count_by_their_category() -> None:
    questions = [
        Question(
            id=f"{kind} {i} {said}", benchmark=MME, category=kind, image=str(i), pair=f"{kind} {i}"
        )
        for i in range(IMAGES)
        for kind in ("colour", "place")
        for said in ("yes", "no")
    ]
    values = [1.0] * len(questions)
    report = report_of((FULL, values), (CONTROL, values), (STATE, values), questions=questions)
    assert [one.kind for one in report.resizing] == [None, "colour", "place"]


def test_fewer_tokens_of_the_resized_image_are_told() -> None:
    cases = ((FULL, 164), (CONTROL, 20), (STATE, 28))
    given = [
        Answer(case=one.name, question=question.id, score=1.0, prompt_tokens=tokens)
        for one, tokens in cases
        for question in QUESTIONS
    ]
    report = build_report(Contents([SETUP, *(one for one, _ in cases), *QUESTIONS, *given]))
    assert compared(report, "mine@8").more_tokens == 8.0
    assert "points right with 8.0 tokens more." in as_markdown(report)
    equal = report_of((FULL, scores(1, 1)), (CONTROL, scores(1, 1)), (STATE, scores(1, 1)))
    assert "tokens more" not in as_markdown(equal)


def test_another_budget_is_not_compared() -> None:
    other = case("mine@16", "found", budget=16)
    report = report_of((FULL, scores(1, 1)), (CONTROL, scores(0, 0)), (other, scores(1, 1)))
    assert report.resizing == ()
    assert "Pruning or resizing?" not in as_markdown(report)


def test_rows_have_the_difference_in_all_metrics() -> None:
    report = report_of((FULL, scores(1, 1)), (CONTROL, scores(0, 1)), (STATE, scores(1, 1)))
    control, state = report.row("resized@8"), report.row("mine@8")
    assert control is not None and state is not None
    assert control.to_resized is None
    assert state.to_resized is not None and state.to_resized.acc is not None
    assert state.to_resized.acc.value == 50.0
    lines = as_markdown(report).splitlines()
    head = next(line for line in lines if line.startswith("| method | read | count | Acc."))
    assert "Acc. less resized" in head
    row = next(line for line in lines if line.startswith("| resize") or "resized |" in line[:12])
    assert row.count("|") == head.count("|")


@pytest.mark.parametrize(
    ("low", "high", "images", "winner"),
    [
        (0.1, 4.0, 6, "pruning"),
        (-4.0, -0.1, 6, "resizing"),
        (0.0, 4.0, 6, "not decided"),
        (-4.0, 0.0, 6, "not decided"),
        (0.1, 4.0, 5, "too few images"),
    ],
)
def test_a_winner_needs_an_interval_without_0_and_enough_images(
    low: float, high: float, images: int, winner: str
) -> None:
    assert find_winner(Estimate((low + high) / 2, low, high), images) == winner
