"""The report of a journal and its page: rows, differences, reasons, pruning against resizing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

import pytest

from tests.evaluation.samples import FULL, QUESTIONS, SETUP, case, contents
from vllm_autoprune.evaluation.journal import (
    MME,
    Answer,
    Case,
    Contents,
    EvaluationError,
    Question,
    Total,
)
from vllm_autoprune.evaluation.report import Comparison, Report, build_report, find_winner
from vllm_autoprune.evaluation.run import format_report
from vllm_autoprune.statistics import Estimate

BASE = case("cdpruner@8")
RESIDUAL = case("cdpruner+autoprune@8", "autoprune", "cdpruner@8", label="ours", quota=2)
OTHER, ON_OTHER = case("dart@8"), case("dart+autoprune@8", "autoprune", "dart@8")
QUOTA = case("quota-4@8", "quota", "cdpruner@8", quota=4)
CONTROL, STATE = case("resized@8", "resized"), case("mine@8", "found", "cdpruner@8")

RIGHT, HALF, FEW = [1.0] * 6, [1.0, 0.0, 1.0, 1.0, 1.0, 0.0], [1.0, *[0.0] * 5]
NOTHING = [0.0] * 6


def markdown(report: Report) -> str:
    return format_report(report, "md")


def answer_of(report: Report) -> tuple[str, str]:
    match = re.search(r'<p class="answer (\w+)">(.*?)</p>', format_report(report, "html"))
    assert match is not None
    return match[1], match[2]


def tables(report: Report) -> dict[str, list[list[str]]]:
    parts = re.findall(r"^### (.*)\n\n?((?:\|.*\n?)*)", markdown(report), re.MULTILINE)
    return {
        caption: [
            [cell.strip() for cell in line.strip("|").split("|")] for line in rows.splitlines()[2:]
        ]
        for caption, rows in parts
    }


def test_rows_have_acc_both_definitions_of_rel_and_paired_differences() -> None:
    report = build_report(contents((FULL, RIGHT), (BASE, HALF), (RESIDUAL, RIGHT)))
    full, base, ours = report.rows
    assert report.valid and report.questions == 6 and report.images == 2
    assert base.benchmarks == {"colour": 50.0, MME: 125.0}
    assert (base.all.acc, base.all.ratio_of_means) == ((50 + 62.5) / 2, 56.25)
    assert base.all.mean_of_ratios == (50 + 62.5) / 2
    assert base.without_mmbench is None and base.prompt_tokens == 20.0
    assert full.to_full is None and base.to_base is None
    assert base.to_full is not None and base.to_full.acc is not None
    assert base.to_full.acc.value == 56.25 - 100
    assert base.to_full.acc.low <= base.to_full.acc.value <= base.to_full.acc.high
    assert ours.to_full is not None and ours.to_full.acc == Estimate(0.0, 0.0, 0.0)
    assert ours.to_base is not None and ours.to_base.mme is not None
    assert ours.to_base.mme.value == 75.0


def add_answers(journal: Contents, count: int) -> None:
    journal.add(STATE)
    for answer in [*contents((STATE, RIGHT)).answers[STATE.name].values()][:count]:
        journal.add(answer)


INCOMPLETE: dict[str, Callable[[Contents], object]] = {
    "mine@8: no question was answered": lambda journal: add_answers(journal, 0),
    "cdpruner@8: 1 of 6 requests failed: status 503": lambda journal: journal.add(
        Answer(case=BASE.name, question="1", failure="status 503")
    ),
    "mine@8: 4 of 6 answers; MME is incomplete": lambda journal: add_answers(journal, 4),
    "the full model is not among the cases": lambda journal: journal.cases.pop("full"),
    "there are no questions": lambda journal: journal.questions.clear(),
}


@pytest.mark.parametrize("reason", INCOMPLETE)
def test_an_incomplete_evaluation_is_not_valid(reason: str) -> None:
    journal = contents((FULL, RIGHT), (BASE, HALF))
    INCOMPLETE[reason](journal)
    report = build_report(journal, ["stopped: <server>"])
    assert not report.valid and report.reasons[0].startswith(reason)
    assert report.row("mine@8") is None
    page, html = markdown(report), format_report(report, "html")
    assert "Not valid: " in page and f"- {reason}" in page and "- stopped: <server>" in page
    assert answer_of(report)[0] == "bad" and "stopped: &lt;server&gt;" in html


def test_a_report_without_a_right_answer_is_not_valid() -> None:
    report = build_report(contents((FULL, NOTHING), (BASE, NOTHING)))
    assert not report.valid and "no answer is right even with all tokens" in report.reasons[0]
    row = report.row(BASE.name)
    assert row is not None and row.all.ratio_of_means is row.all.mean_of_ratios is None
    with pytest.raises(EvaluationError, match="empty"):
        build_report(Contents())


def test_a_refused_case_is_listed_and_no_reason_against_the_report() -> None:
    journal = contents((FULL, RIGHT))
    journal.add(RESIDUAL.model_copy(update={"refused": "K is | too small"}))
    report = build_report(journal)
    assert report.valid and [case.name for case in report.refused] == [RESIDUAL.name]
    page = markdown(report)
    assert "### Cannot be served" in page and r"K is \| too small" in page


def test_totals_of_a_benchmarks_scorer_are_used_and_replace_missing_scores() -> None:
    journal = contents((FULL, RIGHT), (BASE, HALF))
    for name, points in (("full", 190.0), (BASE.name, 95.0)):
        journal.add(Total(case=name, benchmark=MME, metric="m", value=points, count=4))
    row = build_report(journal).row(BASE.name)
    assert row is not None and row.benchmarks == {"colour": 50.0, MME: 95.0}
    assert row.all.mean_of_ratios == 50.0
    unscored = [q.model_copy(update={"benchmark": "MMB-EN"}) for q in QUESTIONS[:2]]
    journal = contents((FULL, RIGHT), (BASE, HALF), questions=[*unscored, *QUESTIONS[2:]])
    for name in ("full", BASE.name):
        for question in ("0", "1"):
            journal.add(Answer(case=name, question=question, text="A"))
        journal.add(Total(case=name, benchmark="MMB-EN", metric="m", value=60.0, count=2))
    full, row = (build_report(journal).row(name) for name in ("full", BASE.name))
    assert row is not None and row.benchmarks == {"MMB-EN": 60.0, MME: 125.0}
    assert row.to_full is not None and row.to_full.acc is None and row.to_full.accuracy is not None
    assert full is not None and full.without_mmbench is not None
    assert full.without_mmbench.acc == 100.0


def test_a_complete_evaluation_has_all_tables_of_the_paper_and_json_without_states() -> None:
    pruned = BASE.model_copy(update={"pruning": {"state": {"name": "x"}}})
    cases = ((FULL, RIGHT), (pruned, HALF), (RESIDUAL, RIGHT), (OTHER, HALF), (ON_OTHER, HALF))
    report = build_report(contents(*cases, (QUOTA, HALF)))
    result = tables(report)
    assert list(result) == ["K = 8"]
    main = {row[0]: row[1:] for row in result["K = 8"]}
    assert list(main) == ["full", "cdpruner", "ours", "dart", "dart+autoprune", "quota-4"]
    assert main["cdpruner"][:5] == ["50.0", "125.0", "56.2", "56.2", "56.2"]
    assert main["full"][5] == "-" and main["ours"][6].startswith("+43.8 (")
    assert main["dart+autoprune"][6] == "0.0 (0.0 to 0.0)"
    assert "\n- A trial run: 2 images are too few" in markdown(report)
    row = json.loads(format_report(report, "json"))["rows"][1]
    assert row["case"]["name"] == "cdpruner@8" and "pruning" not in row["case"]
    tone, answer = answer_of(report)
    assert tone == "open" and answer.startswith("A trial run on 2 images, no measurement: ")


@pytest.mark.parametrize(("scores", "right"), [(RIGHT, "100.0"), (FEW, "16.7")])
def test_the_page_says_how_many_answers_are_right_with_all_tokens(
    scores: list[float], right: str
) -> None:
    page = markdown(build_report(contents((FULL, scores), (CONTROL, FEW), (BASE, FEW))))
    assert f"With all tokens, {right} % of the answers are right." in page
    assert bool(re.search(r"not written\s+as the model writes it", page)) == (scores is FEW)


def test_the_page_answers_first_and_draws_accuracy_over_the_budget() -> None:
    cases = (
        (FULL, [1.0] * 40),
        (case("ours@8", "found", label="ours <i>"), [1.0, 0.0] * 20),
        (case("ours@4", "found", label="ours <i>"), [0.0, 0.0, 0.0, 1.0] * 10),
    )
    questions = [Question(id=str(n), benchmark="colour", image=f"i{n}") for n in range(40)]
    report = build_report(contents(*cases, questions=questions))
    (tone, answer), page = answer_of(report), format_report(report, "html")
    assert tone == "bad" and "trial run" not in page
    assert "ours &lt;i&gt; at K = 8 answers 50.0 % of the questions right, 50.0 points" in answer
    assert len(re.findall(r'id="mark-\d"', page)) == 2 and ">all tokens 100.0 %</text>" in page
    assert "K = 4" in page and "<i>" not in page
    assert {"4", "8"} <= {*re.findall(r">(\d+)</text>", page)}, "the budgets that were measured"


def test_rows_are_compared_with_published_ones_of_the_same_method_and_budget() -> None:
    setup = SETUP.model_copy(update={"backbone": "llava-1.5-7b", "mme_divisor": 20.0})
    questions = [
        q if q.benchmark == MME else q.model_copy(update={"benchmark": "POPE"}) for q in QUESTIONS
    ]
    cases = [(each, RIGHT) for each in (FULL, case("cdpruner@32"), case("cdpruner@33"))]
    result = tables(build_report(contents(*cases, questions=questions, setup=setup)))
    rows = result["Ours / published, main, llava-1.5-7b"]
    assert [row[:2] for row in rows] == [["full", "576"], ["CDPruner", "32"]]
    # Only two of ten columns were measured, so Acc. cannot be compared.
    assert rows[1][2:5] == ["100.0 / 87.9", "200.0 / 1373.0", "55.0 / -"]


IMAGES = 8
BY_KIND = tuple(
    Question(id=f"{kind} {image}", benchmark=kind, image=str(image))
    for image in range(IMAGES)
    for kind in ("read", "count")
)


def scores(read: float, count: float) -> list[float]:
    return [read, count] * IMAGES


def report_of(
    *cases: tuple[Case, Sequence[float]], questions: Sequence[Question] = BY_KIND
) -> Report:
    """The report of questions of two kinds, with all tokens always right."""
    right = (FULL, [1.0] * len(questions))
    return build_report(contents(right, *cases, questions=questions))


def compared(report: Report, name: str, kind: str | None = None) -> Comparison:
    (row,) = [row for row in report.resizing if (row.case, row.kind) == (name, kind)]
    return row


def test_a_line_says_who_wins_overall_and_by_kind() -> None:
    mixed = [1.0, 0.0] * (IMAGES // 2) + [1.0, 1.0] * (IMAGES // 2)
    page = markdown(report_of((CONTROL, scores(0, 1)), (STATE, mixed)))
    (line,) = [line for line in page.splitlines() if line.startswith("- mine")]
    assert line.startswith("- mine, K = 8: pruning beats resizing, +25.0 (")
    assert "pruning wins: read +100.0 (+100.0 to +100.0); resizing wins: count -50.0 (" in line


def test_differences_are_paired_and_by_kind() -> None:
    report = report_of((CONTROL, scores(1, 0)), (STATE, scores(1, 1)))
    overall = compared(report, "mine@8")
    assert overall.difference == Estimate(50.0, 50.0, 50.0)
    assert (overall.questions, overall.images, overall.winner) == (16, 8, "pruning")
    assert compared(report, "mine@8", "count").difference.value == 100.0
    same = compared(report, "mine@8", "read")
    assert (same.difference.value, same.winner, same.questions) == (0.0, "not decided", 8)
    control, state = report.row("resized@8"), report.row("mine@8")
    assert control is not None and state is not None and control.to_resized is None
    assert state.to_resized is not None and state.to_resized.acc == Estimate(50.0, 50.0, 50.0)
    assert "| Acc. less resized |" in markdown(report)


def test_only_states_that_are_not_compared_with_get_a_line() -> None:
    cases = [(CONTROL, scores(0, 0)), (BASE, scores(0, 0))]
    assert "- cdpruner, K = 8: not decided" in markdown(report_of(*cases))
    page = markdown(report_of(*cases, (STATE, scores(0, 0))))
    assert "- mine, K = 8" in page and "- cdpruner, K = 8" not in page
    assert "| cdpruner |" in page[page.index("## Less the resize control by kind") :]
    other = report_of(cases[0], (case("mine@16", "found"), scores(1, 1)))
    assert other.resizing == () and "Pruning or resizing?" not in markdown(other)


@pytest.mark.parametrize(("kinds", "listed"), [("cp", [None, "c", "p"]), ("c", [None])])
def test_kinds_are_categories_of_pairs_and_a_single_kind_is_not_repeated(
    kinds: str, listed: list[str | None]
) -> None:
    questions = [
        Question(id=pair + said, benchmark=MME, category=pair[0], image=pair[1:], pair=pair)
        for pair in (f"{kind}{n}" for n in range(IMAGES) for kind in kinds)
        for said in ("yes", "no")
    ]
    right = [1.0] * len(questions)
    report = report_of((CONTROL, right), (STATE, right), questions=questions)
    assert [row.kind for row in report.resizing] == listed
    assert ("By kind" in markdown(report)) == (len(listed) > 1)


def test_fewer_tokens_of_the_resized_image_are_told() -> None:
    cases = [(each, scores(1, 1)) for each in (FULL, CONTROL, STATE)]
    for lengths, more in (((164, 20, 28), 8.0), ((164, 28, 28), 0.0)):
        report = build_report(contents(*cases, questions=BY_KIND, prompt_tokens=lengths))
        assert compared(report, "mine@8").more_tokens == more
        assert ("points right with 8.0 tokens more." in markdown(report)) == bool(more)


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
