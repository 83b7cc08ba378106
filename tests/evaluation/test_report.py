"""The report of a journal: rows, differences, reasons against it, pruning against resizing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.evaluation.samples import FULL, QUESTIONS, SETUP, answers, case, contents
from vllm_autoprune.evaluation.journal import (
    MME,
    Answer,
    Case,
    Contents,
    EvaluationError,
    Question,
    Total,
)
from vllm_autoprune.evaluation.pages import as_markdown
from vllm_autoprune.evaluation.report import Comparison, Report, build_report, find_winner
from vllm_autoprune.statistics import Estimate

BASE = case("visionzip@8")
OURS = case("visionzip+autoprune@8", "autoprune", base="visionzip@8")

RIGHT, HALF = [1.0] * 6, [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]


def sample_report() -> Report:
    return build_report(contents((FULL, RIGHT), (BASE, HALF), (OURS, RIGHT)))


def test_a_row_has_acc_and_both_definitions_of_rel() -> None:
    row = sample_report().row("visionzip@8")
    assert row is not None
    assert row.benchmarks == {"colour": 50.0, MME: 125.0}
    assert row.all.acc == (50 + 62.5) / 2
    assert row.all.ratio_of_means == 56.25
    assert row.all.mean_of_ratios == (50 + 62.5) / 2
    assert row.without_mmbench is None and row.prompt_tokens == 20.0


def test_differences_are_to_full_and_to_the_base_policy() -> None:
    report = sample_report()
    full, base, ours = (report.row(n) for n in ("full", "visionzip@8", "visionzip+autoprune@8"))
    assert full is not None and base is not None and ours is not None
    assert full.to_full is None and base.to_base is None
    assert base.to_full is not None and base.to_full.acc is not None
    assert base.to_full.acc.value == 56.25 - 100
    assert base.to_full.acc.low <= base.to_full.acc.value <= base.to_full.acc.high
    assert ours.to_full is not None and ours.to_full.acc is not None
    assert ours.to_full.acc.value == ours.to_full.acc.low == ours.to_full.acc.high == 0.0
    assert ours.to_base is not None and ours.to_base.mme is not None
    assert ours.to_base.mme.value == 75.0


def test_a_complete_evaluation_is_valid() -> None:
    report = sample_report()
    assert report.valid and report.questions == 6 and report.images == 2 and len(report.rows) == 3


def test_a_case_with_failed_requests_has_no_row() -> None:
    journal = contents((FULL, RIGHT), (BASE, HALF))
    journal.add(Answer(case=BASE.name, question="1", failure="status 503"))
    report = build_report(journal)
    assert report.reasons == ("visionzip@8: 1 of 6 requests failed: status 503",)
    assert [row.case.name for row in report.rows] == ["full"]


def test_a_case_with_missing_answers_has_no_row() -> None:
    journal = contents((FULL, RIGHT))
    journal.add(BASE)
    for answer in answers(BASE.name, HALF)[:4]:
        journal.add(answer)
    report = build_report(journal)
    assert report.reasons == ("visionzip@8: 4 of 6 answers; MME is incomplete",)
    assert report.row(BASE.name) is None


def test_without_the_full_model_there_are_no_rows() -> None:
    report = build_report(contents((BASE, HALF)))
    assert not report.valid and "full model" in report.reasons[0] and not report.rows


def test_a_case_that_cannot_be_served_is_listed() -> None:
    refused = OURS.model_copy(update={"refused": "K is too small"})
    journal = contents((FULL, RIGHT), (BASE, HALF))
    journal.add(refused)
    report = build_report(journal)
    assert report.valid and report.refused == (refused,)


def test_totals_of_the_benchmarks_scorer_are_used() -> None:
    journal = contents((FULL, RIGHT), (BASE, HALF))
    for name, points in (("full", 190.0), (BASE.name, 95.0)):
        journal.add(Total(case=name, benchmark=MME, metric="m", value=points, count=4))
    row = build_report(journal).row(BASE.name)
    assert row is not None
    assert row.benchmarks == {"colour": 50.0, MME: 95.0}
    assert row.all.mean_of_ratios == 50.0


def test_aggregates_exist_without_mmbench() -> None:
    names = {"colour": "MMB-EN"}
    journal = Contents([SETUP, FULL, *answers("full", RIGHT)])
    for question in QUESTIONS:
        name = names.get(question.benchmark, question.benchmark)
        journal.add(question.model_copy(update={"benchmark": name}))
    row = build_report(journal).row("full")
    assert row is not None and row.without_mmbench is not None
    assert row.without_mmbench.acc == 100.0


def test_no_right_answer_does_not_divide_by_zero() -> None:
    nothing = [0.0] * 6
    row = build_report(contents((FULL, nothing), (BASE, HALF))).row(BASE.name)
    assert row is not None
    assert row.all.ratio_of_means is None and row.all.mean_of_ratios is None


def test_an_empty_journal_has_no_report() -> None:
    with pytest.raises(EvaluationError, match="empty"):
        build_report(Contents())


def test_a_report_without_a_right_answer_is_not_valid() -> None:
    report = build_report(contents((FULL, [0.0] * 6), (case("cdpruner@8"), [0.0] * 6)))
    assert not report.valid
    assert "no answer is right even with all tokens" in report.reasons[0]


IMAGES = 8
BY_KIND = tuple(
    Question(id=f"{kind} {image}", benchmark=kind, image=str(image))
    for image in range(IMAGES)
    for kind in ("read", "count")
)
CONTROL = case("resized@8", "resized")
REFERENCE = case("cdpruner@8")
STATE = case("mine@8", "found", base="cdpruner@8")


def scores(read: float, count: float) -> list[float]:
    return [read, count] * IMAGES


def report_of(
    *cases: tuple[Case, Sequence[float]], questions: Sequence[Question] = BY_KIND
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
    cases = [(FULL, scores(1, 1)), (CONTROL, scores(0, 0)), (REFERENCE, scores(0, 0))]
    assert "- cdpruner, K = 8: not decided" in as_markdown(report_of(*cases))
    page = as_markdown(report_of(*cases, (STATE, scores(0, 0))))
    assert "- mine, K = 8" in page and "- cdpruner, K = 8" not in page
    assert "| cdpruner |" in page[page.index("## Less the resize control by kind") :]


def test_a_single_kind_is_not_repeated() -> None:
    questions = [one for one in BY_KIND if one.benchmark == "read"]
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
        for question in BY_KIND
    ]
    report = build_report(Contents([SETUP, *(one for one, _ in cases), *BY_KIND, *given]))
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
