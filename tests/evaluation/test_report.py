from __future__ import annotations

import pytest

from tests.evaluation.samples import FULL, QUESTIONS, SETUP, answers, case, contents
from vllm_autoprune.evaluation.journal import Contents
from vllm_autoprune.evaluation.records import MME, Answer, EvaluationError, Total
from vllm_autoprune.evaluation.report import Report, build_report

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
