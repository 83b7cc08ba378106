"""Reports of answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

import pytest

from tests.tables import parametrize_from_file
from vllm_autoprune.evaluation.journal import (
    MME,
    Answer,
    Arm,
    Case,
    Contents,
    Question,
    Setup,
    Total,
)
from vllm_autoprune.evaluation.page import _last_common_words, build_page
from vllm_autoprune.evaluation.report import Comparison, Report, _Row
from vllm_autoprune.statistics import Estimate

QUESTIONS = (
    Question(id="0", benchmark="colour", image="a"),
    Question(id="1", benchmark="colour", image="b"),
    *(
        Question(
            id=str(n), benchmark=MME, image=image, category="existence", pair=image
        )
        for n, image in enumerate("aabb", 2)
    ),
)
FULL = Case(name="full", arm="full", label="full")


def case(name: str, arm: Arm = "base", base: str = "", **more: object) -> Case:
    """A case named LABEL@K; states are named by the user, unless ``more`` says otherwise."""
    label, _, said = name.partition("@")
    budget: int | str = int(said) if said.isdigit() else said
    named = int(arm in ("autoprune", "found"))
    fields = {"name": name, "arm": arm, "label": label, "budget": budget, "base": base}
    return Case.model_validate({**fields, "named": named, **more})


def contents(
    *cases: tuple[Case, Sequence[float | None]],
    questions: Sequence[Question] = QUESTIONS,
    prompt_tokens: Sequence[int] = (),
) -> Contents:
    """The contents of a journal in which every case has one score per question."""
    answers = [
        Answer(
            case=case.name,
            question=question.id,
            score=score,
            logprob=-1.0,
            prompt_tokens=count,
        )
        for number, (case, scores) in enumerate(cases)
        for count in [
            prompt_tokens[number]
            if prompt_tokens
            else 12 + (case.budget_order[0] or 24)
        ]
        for question, score in zip(questions, scores, strict=True)
    ]
    setup = Setup(suite="s", model="m", data="d", scorer="by hand", mme_divisor=2.0)
    return Contents([setup, *(case for case, _ in cases), *questions, *answers])


BASE = case("cdpruner@8")
CONTROL = case("resized@8", "resized")
RESIDUAL = case("cdpruner+autoprune@8", "autoprune", "cdpruner@8", label="ours")
STATE = case("mine@8", "found", "cdpruner@8")

RIGHT = [1.0] * 6
HALF = [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]


def row_of(report: Report, name: str) -> _Row:
    (row,) = [row for row in report.rows if row.case.name == name]
    return row


def test_rows_have_acc_both_definitions_of_rel_and_paired_differences() -> None:
    report = Report.build(contents((FULL, RIGHT), (BASE, HALF), (RESIDUAL, RIGHT)))
    base = report.rows[1]
    assert report.valid and (report.questions, report.images) == (6, 2)
    assert base.benchmarks == {"colour": 50.0, MME: 125.0}
    assert base.all.model_dump() == {
        "acc": (50 + 62.5) / 2,
        "ratio_of_means": 56.25,
        "mean_of_ratios": (50 + 62.5) / 2,
    }
    assert base.accuracy is not None
    assert base.accuracy.value == pytest.approx(100 * 4 / 6, abs=1e-4)
    assert (base.accuracy_plus, base.prompt_tokens) == (50.0, 20.0)


def test_rows_are_paired_with_the_unpruned_model_and_the_base_policy() -> None:
    report = Report.build(contents((FULL, RIGHT), (BASE, HALF), (RESIDUAL, RIGHT)))
    full, base, ours = report.rows
    assert full.to_full is None and base.to_base is None
    assert base.to_full is not None and base.to_full.acc is not None
    loss = base.to_full.acc
    assert loss.value == 56.25 - 100 and not loss.is_bounded  # of two images
    assert ours.to_full is not None and ours.to_full.acc is not None
    assert ours.to_full.acc.value == 0.0
    assert ours.to_base is not None and ours.to_base.mme is not None
    assert ours.to_base.mme.value == 75.0


def test_categories_of_mme_are_summed() -> None:
    """Two categories with everything right are 400 points, as MME's perception of ten is 2000."""
    questions = [
        Question(
            id=f"{c}{n}",
            benchmark=MME,
            image=f"{c}{n // 2}",
            category=c,
            pair=f"{c}{n // 2}",
        )
        for c in ("count", "scene")
        for n in range(4)
    ]
    counted = [float(question.category == "count") for question in questions]
    report = Report.build(
        contents((FULL, [1.0] * 8), (BASE, counted), questions=questions)
    )
    assert [(row.benchmarks[MME], row.all.acc) for row in report.rows] == [
        (400, 200),
        (200, 100),
    ]


def test_totals_of_a_benchmarks_scorer_are_used_and_replace_missing_scores() -> None:
    unscored = [q.model_copy(update={"benchmark": "MMB-EN"}) for q in QUESTIONS[:2]]
    scores = [None, None, *HALF[2:]]
    journal = contents(
        (FULL, RIGHT), (BASE, scores), questions=[*unscored, *QUESTIONS[2:]]
    )
    assert [row.case.name for row in Report.build(journal).rows] == ["full"]
    for name, points in (("full", 60.0), (BASE.name, 45.0)):
        total = Total(case=name, benchmark="MMB-EN", metric="m", value=points, count=2)
        journal.totals[name] = {"MMB-EN": total}
    row = row_of(Report.build(journal), BASE.name)
    assert row.benchmarks == {"MMB-EN": 45.0, MME: 125.0} and row.to_full is not None
    assert row.to_full.acc is None and row.to_full.accuracy is not None


def add_state(journal: Contents, count: int) -> None:
    journal.cases[STATE.name] = STATE
    answers = contents((STATE, RIGHT)).answers[STATE.name]
    journal.answers[STATE.name] = dict(list(answers.items())[:count])


FAILED = Answer(case=BASE.name, question="1", failure="status 503")
INCOMPLETE: dict[str, Callable[[Contents], object]] = {
    "mine@8: 0 of 6 answers; colour, MME is incomplete": lambda journal: add_state(
        journal, 0
    ),
    "cdpruner@8: 1 of 6 requests failed: status 503": lambda journal: journal.answers[
        BASE.name
    ].update({"1": FAILED}),
    "mine@8: 4 of 6 answers; MME is incomplete": lambda journal: add_state(journal, 4),
    "the full model is not among the cases": lambda journal: journal.cases.pop("full"),
    "there are no questions": lambda journal: journal.questions.clear(),
}


@pytest.mark.parametrize("reason", INCOMPLETE)
def test_an_incomplete_evaluation_is_not_valid(reason: str) -> None:
    journal = contents((FULL, RIGHT), (BASE, HALF))
    INCOMPLETE[reason](journal)
    report = Report.build(journal, ["stopped: the server"])
    assert not report.valid and report.reasons[0].startswith(reason)
    assert "mine@8" not in [row.case.name for row in report.rows]
    page = build_page(report).render_markdown()
    assert (
        "Not valid: " in page
        and f"- {reason}" in page
        and "- stopped: the server" in page
    )


def test_a_report_of_nothing_right_is_not_valid() -> None:
    report = Report.build(contents((FULL, [0.0] * 6), (BASE, [0.0] * 6)))
    assert "no answer is right even with all tokens" in report.reasons[0]
    row = row_of(report, BASE.name)
    assert row.all.ratio_of_means is row.all.mean_of_ratios is None


IMAGES = 8
BY_KIND = tuple(
    Question(id=f"{kind} {image}", benchmark=kind, image=str(image))
    for image in range(IMAGES)
    for kind in ("read", "count")
)


def report_of(
    *cases: tuple[Case, Sequence[float]], questions: Sequence[Question] = BY_KIND
) -> Report:
    """The report of questions of two kinds, with all tokens always right."""
    right = (FULL, [1.0] * len(questions))
    return Report.build(contents(right, *cases, questions=questions))


def test_states_are_compared_with_resizing_overall_and_by_kind() -> None:

    def compared(report: Report, name: str, kind: str | None = None) -> Comparison:
        (row,) = [
            row for row in report.resizing if (row.case, row.kind) == (name, kind)
        ]
        return row

    report = report_of((CONTROL, [1, 0] * IMAGES), (STATE, [1, 1] * IMAGES))
    overall = compared(report, "mine@8")
    assert overall.difference == Estimate(50.0, 50.0, 50.0)
    assert (overall.questions, overall.images, overall.winner) == (16, 8, "pruning")
    assert compared(report, "mine@8", "count").difference.value == 100.0
    read = compared(report, "mine@8", "read")
    assert (read.difference.value, read.winner, read.questions) == (
        0.0,
        "not decided",
        8,
    )
    state = row_of(report, "mine@8")
    assert state.to_resized is not None and state.to_resized.acc == Estimate(
        50.0, 50.0, 50.0
    )
    assert row_of(report, "resized@8").to_resized is None
    none = [0.0] * 2 * IMAGES
    other = report_of((CONTROL, none), (case("mine@16", "found"), none))
    assert other.resizing == ()
    assert "Pruning or resizing?" not in build_page(other).render_markdown()


@parametrize_from_file("pruned", "resized", "images", "winner")
def test_a_winner_needs_an_interval_without_0_and_enough_images(
    pruned: int, resized: int, images: int, winner: str
) -> None:
    control, state = (
        [float(n < right) for n in range(images)] for right in (resized, pruned)
    )
    questions = [
        Question(id=str(n), benchmark="a", image=str(n)) for n in range(images)
    ]
    report = report_of((CONTROL, control), (STATE, state), questions=questions)
    (overall,) = report.resizing  # a single kind is not repeated
    assert overall.winner == winner


@pytest.mark.parametrize(
    ("right", "pruned", "tone"),
    [
        ([1, 1], [1, 1], "good"),
        ([1, 1], [1, 0], "open"),  # all tokens are right more often
        ([1, 0], [1, 0], "good"),
        ([0, 0], [1, 0], "open"),  # all tokens are wrong more often than right
    ],
)
def test_good_is_only_what_loses_nothing_against_a_model_that_is_mostly_right(
    right: list[float], pruned: list[float], tone: str
) -> None:
    questions = [
        Question(id=f"{n}", benchmark="a", image=f"{n // 2}") for n in range(16)
    ]
    all_tokens = [1.0, *right * 7, 1.0]
    cases = ((FULL, all_tokens), (CONTROL, [0.0] * 16), (STATE, pruned * 8))
    page = build_page(Report.build(contents(*cases, questions=questions)))
    assert page.tone == tone and "pruning beats resizing" in page.answer
    assert ("these questions tell little" in page.answer) == (right == [0, 0])


def test_figures_of_too_few_images_have_no_interval() -> None:
    report = Report.build(contents((FULL, RIGHT), (BASE, HALF), (STATE, HALF)))
    page = build_page(report).render_markdown()
    answer = "A trial run on 2 images, no measurement (at least 20 images): mine at K = 8 answers"
    lost = "66.7 % of the questions right, -33.3 points against all tokens"
    assert page.splitlines()[2].startswith(f"{answer} {lost};")
    assert not re.search(r"\([+-]?\d+\.\d+ to ", page)
    row = json.loads(report.format_json())["rows"][2]
    bounds = {"value": -33.3333, "low": None, "high": None}
    assert row["to_full"]["accuracy"] == bounds


def test_a_report_is_about_the_state_that_was_named_first() -> None:
    second = case("other@8", "found", named=2)
    norm = case("norm@8", "norm")
    cases = ((CONTROL, HALF), (norm, RIGHT), (second, RIGHT), (STATE, HALF))
    report = Report.build(contents((FULL, RIGHT), *cases))
    assert report.case == STATE and report.states == [second, STATE]
    controls = Report.build(contents((FULL, RIGHT), (norm, RIGHT)))
    assert controls.case is None
    assert "No state was measured here" in build_page(controls).answer


def test_the_page_says_who_wins_of_each_state_that_was_to_be_evaluated() -> None:
    mixed = [1.0, 0.0] * (IMAGES // 2) + [1.0, 1.0] * (IMAGES // 2)
    named = case("cdpruner@8", named=1)
    cases = [(CONTROL, [0, 1] * IMAGES), (named, [0, 1] * IMAGES)]
    assert (
        "- cdpruner, K = 8: not decided"
        in build_page(report_of(*cases)).render_markdown()
    )
    cases[1] = (BASE, [0, 1] * IMAGES)
    page = build_page(report_of(*cases, (STATE, mixed))).render_markdown()
    assert "With all tokens, 100.0 % of the answers are right." in page
    (line,) = [line for line in page.splitlines() if ", K = 8: " in line]
    assert line.startswith("- mine, K = 8: pruning beats resizing, +25.0 (")
    assert "### By kind of question" in page
    assert "| mine | read | pruning | 8 | +100.0 (+100.0 to +100.0) |" in page
    assert "| mine | count | " in page
    assert page.splitlines()[2].startswith(
        "A trial run on 8 images, no measurement (at least 20"
    )
    answer = "mine at K = 8 answers 75.0 % of the questions right, -25.0 ("
    assert answer in page.splitlines()[2]
    assert "; pruning beats resizing, +25.0 (" in page.splitlines()[2]


def test_states_upon_one_base_policy_are_told_apart() -> None:
    mixed = [1.0, 0.0] * (IMAGES // 2) + [1.0, 1.0] * (IMAGES // 2)
    policy = case("cdpruner@8", "found")
    policy = case("cdpruner@8", "found")
    report = report_of((CONTROL, [0, 1] * IMAGES), (policy, mixed), (STATE, mixed))
    page = build_page(report).render_markdown()
    assert page.count(", K = 8: pruning beats") == 2 and "cdpruner at K = 8" in page


@pytest.mark.parametrize(
    ("resized", "words"), [(20, " with 8.0 tokens more."), (28, " right.")]
)
def test_the_page_says_how_many_tokens_pruning_has_more(
    resized: int, words: str
) -> None:
    right = [(each, [1] * 2 * IMAGES) for each in (FULL, CONTROL, STATE)]
    journal = contents(*right, questions=BY_KIND, prompt_tokens=(164, resized, 28))
    assert words in build_page(Report.build(journal)).render_markdown()


def test_states_are_compared_with_their_base_with_each_other_and_ordered_by_agreement() -> (
    None
):
    rights = {
        "mine": [1.0] * 16,
        "cdpruner": [1.0, 0.0] * 8,
        "trim": [1.0] * 4 + [0.0] * 12,
        "dart": [0.0] * 16,
    }
    asked = [
        (case(f"{name}@8", "found", "cdpruner@8" if name == "mine" else ""), right)
        for name, right in rights.items()
    ]
    journal = contents((FULL, [1.0] * 16), *asked, questions=BY_KIND)
    for answers in journal.answers.values():
        for id, answer in answers.items():  # trim and dart agree as often
            agrees = bool(answer.score) and answer.case != "trim@8"
            answers[id] = answer.model_copy(update={"agrees": agrees})
    report = Report.build(journal)
    assert report.rank_correlations.keys() == {"agreement"}
    assert (
        report.rank_correlations["agreement"].value == 0.949
    )  # of ranks 4, 3, 1.5, 1.5
    page = build_page(report).render_markdown()
    assert "; +50.0 (+50.0 to +50.0) against cdpruner alone" in page.splitlines()[2]
    head, trim = re.findall(r"^\| (?:method|trim) .*", page, re.MULTILINE)
    place = head.split(" | ").index("Acc. less mine")
    assert trim.split(" | ")[place].startswith("-75.0 (")


def test_the_page_has_a_table_for_each_budget_and_what_cannot_be_served() -> None:
    few = [1.0, *[0.0] * 5]
    others = [(case(f"dart@{budget}"), few) for budget in (4, "1/99")]
    journal = contents((FULL, RIGHT), (BASE, HALF), (RESIDUAL, RIGHT), *others)
    refused = case("trim@8", refused="K is | too small")
    journal.cases[refused.name] = refused
    report = Report.build(journal)
    assert report.valid and report.refused == (refused,)
    page = build_page(report).render_markdown()
    tables = re.findall(r"^### (.*)\n\n((?:\|.*\n)*)", page, re.MULTILINE)
    assert [caption for caption, _ in tables] == [
        "K = 8",
        "K = 1/99",
        "K = 4",
        "Not measured",
    ]
    head, _, full, base, ours = [
        line.strip("| ").split(" | ") for line in tables[0][1].splitlines()
    ]
    assert head[:5] == ["method", "% right", "ln p", "colour", MME]
    assert head[-1] == "ln p less resized"
    assert base[1:8] == ["66.7", "-1.000", "50.0", "125.0", "56.2", "56.2", "56.2"]
    assert full[8] == "-" and ours[0] == "ours" and ours[9] == "+43.8"
    assert r"| trim | 8 | K is \| too small |" in page


def test_the_page_draws_accuracy_over_the_budget() -> None:
    half = case("ours <i>@1/2", "found")
    cases = ((FULL, RIGHT), (case("ours <i>@8", "found"), HALF), (half, RIGHT))
    page = build_page(Report.build(contents(*cases, (CONTROL, HALF))))
    html = page.render_html()
    (figure,) = re.findall(r'<figure class="chart">.*?</figure>', html, re.DOTALL)
    assert "Accuracy over K" in figure and ">all tokens 100.0 %</text>" in figure
    tips = re.findall(r"<title>([^<]*)</title>", figure)
    assert [tip.partition(" (")[0] for tip in tips] == [
        "ours &lt;i&gt;, K = 8: 66.7 %",
        "ours &lt;i&gt;, K = 1/2: 100.0 %",
        "resized, K = 8: 66.7 %",
    ]
    assert "% right over visual tokens kept, K, of an image of 576" in figure
    assert "Accuracy over K" not in page.render_markdown(), "which has no charts"
    unscored = build_page(Report.build(contents((FULL, RIGHT))))
    assert "<figure" not in unscored.render_html()


# ---- the unpruned model's answer as reference ----

TEXT = "the dog sleeps on a red sofa"


def unlabelled(
    *cases: tuple[Case, Sequence[tuple[int, float]]],
    left_out: int = 0,
    cut: bool = False,
) -> Contents:
    """Contents without labels: tokens given, and ln p, of each image's question in each case.

    The unpruned model says :data:`TEXT`, of seven tokens; of the first ``left_out``, nothing.
    """
    rows = [(FULL, [SAME] * len(cases[0][1])), *cases]
    setup = Setup(suite="s", model="m", data="d", scorer="by hand", score="agrees")
    questions = [
        Question(id=str(n), benchmark="all", image=f"{n}.png", text=f"{n}?")
        for n in range(len(cases[0][1]))
    ]
    answers = []
    for case, scores in rows:
        for question, (matching, logprob) in zip(questions, scores, strict=True):
            agrees = matching == 7
            known: dict[str, object] = (
                {
                    "score": float(agrees),
                    "logprob": logprob,
                    "tokens": 7,
                    "matching": matching,
                    "same": 7 if agrees else 2,
                    "agrees": agrees,
                }
                if int(question.id) >= left_out
                else {}
            )
            if case is FULL:
                known |= {"text": TEXT if known else "", "cut": cut}
            elif not agrees:
                known["text"] = "the dog runs"
            answer = {"case": case.name, "question": question.id, **known}
            answers.append(Answer.model_validate(answer))
    return Contents([setup, *(case for case, _ in rows), *questions, *answers])


SAME = (7, -0.7)
WORSE = (3, -7.0)
OTHER = (6, -0.9)


@pytest.mark.parametrize(
    ("state", "control", "winner"),
    [
        ([WORSE] * 20, [SAME] * 20, "resizing"),
        # Neither says what the model says; whatever ln p says.
        ([OTHER] * 20, [(4, -0.8)] * 20, "pruning"),
        ([SAME, WORSE] * 10, [WORSE, SAME] * 10, "not decided"),
    ],
)
def test_without_labels_the_share_of_tokens_decides(
    state: Sequence[tuple[int, float]],
    control: Sequence[tuple[int, float]],
    winner: str,
) -> None:
    report = Report.build(unlabelled((CONTROL, control), (STATE, state)))
    assert (
        report.valid and report.overall is not None and report.overall.winner == winner
    )
    gain = sum(
        pruned[0] - resized[0] for pruned, resized in zip(state, control, strict=True)
    )
    expected = pytest.approx(100 * gain / 7 / len(state), abs=1e-4)
    assert report.overall.difference.value == expected
    # Never good, because a token that differs is a loss against the unpruned model.
    assert build_page(report).tone == ("bad" if winner == "resizing" else "open")


MIXED = [SAME] * 15 + [WORSE] * 2 + [OTHER] * 3
"""Answers of a state that agree, fall off, and are others."""


def test_the_page_without_labels_leads_with_what_decides() -> None:
    report = Report.build(unlabelled((CONTROL, [WORSE] * 20), (STATE, MIXED), cut=True))
    page = build_page(report).render_markdown()
    answer = page.splitlines()[2]
    share = "mine at K = 8 gives 75.0 % of the unpruned model's answers and 92.1 %"
    assert answer.startswith(share)
    assert "; pruning beats resizing, +49.3 (" in answer and "right" not in answer
    assert " points of tokens and +0.806 (" in answer
    assert answer.endswith(" ln p a token.")
    assert "Agreement is not accuracy" in page
    assert "- 20 answers of the unpruned model were cut there" in page
    (row,) = (row for row in report.rows if row.case == STATE)
    assert (row.accuracy, row.agreement and row.agreement.value) == (None, 75.0)


def test_the_page_without_labels_has_tables_of_agreement_and_of_the_largest_falls() -> (
    None
):
    report = Report.build(unlabelled((CONTROL, [WORSE] * 20), (STATE, MIXED), cut=True))
    page = build_page(report).render_markdown()
    head, full, mine = re.findall(r"^\| (?:method|full|mine) .*", page, re.MULTILINE)
    columns = "method | % agree | % of tokens | same until, % | ln p a token | ln p | % agree less"
    assert head.startswith(f"| {columns}")
    assert full.startswith("| full | 100.0 | 100.0 | 100.0 | -0.100 | -0.700 | - |")
    assert mine.startswith("| mine | 75.0 | 92.1 | 82.1 | -0.194 | -1.360 | ")
    # The largest falls first, each with the words before the answers part.
    rows = re.findall(r"^\| \d+\.png \|.*", page, re.MULTILINE)
    assert rows[0] == f"| 15.png | 15? | {TEXT} | the dog runs | the dog | -0.90 |"
    assert [row[2:4] for row in rows] == ["15", "16", "17", "18", "19"]
    html = build_page(report, lambda id: f"data:image/png;base64,{id}").render_html()
    assert html.count("<img ") == 5
    assert '<img src="data:image/png;base64,15" alt="">' in html


def test_questions_without_a_reference_are_left_out_and_said() -> None:
    cases = (CONTROL, [WORSE] * 20), (STATE, [SAME] * 20)
    report = Report.build(unlabelled(*cases, left_out=2))
    assert report.valid and (report.questions, report.images, report.left_out) == (
        18,
        18,
        2,
    )
    assert (
        "- 2 left out: their answer has no token"
        in build_page(report).render_markdown()
    )
    report = Report.build(unlabelled(*cases, left_out=20))
    assert report.reasons == ("full: no answer of the unpruned model can be scored",)


def test_answers_share_their_words_up_to_the_first_that_differs() -> None:
    words = "a b c d e"
    assert _last_common_words(f"{words} x", f"{words} y") == words
    assert _last_common_words(f"z {words} x", f"z {words}") == f"... {words}"
    assert _last_common_words("x", "y") == "the start"
    assert _last_common_words("x", "x") == _last_common_words("x", None) == "-"
