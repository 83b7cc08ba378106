from __future__ import annotations

import json
import re
from collections.abc import Sequence

from tests.evaluation.samples import FULL, QUESTIONS, SETUP, answers, case, contents
from vllm_autoprune.evaluation.journal import Answer, Case, Contents, Question
from vllm_autoprune.evaluation.pages import as_html, as_markdown
from vllm_autoprune.evaluation.report import Report, build_report
from vllm_autoprune.evaluation.run import as_json

RIGHT, HALF = [1.0] * 6, [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]

BASE = case("cdpruner@8")
OURS = case("cdpruner+autoprune@8", "autoprune", base="cdpruner@8").model_copy(
    update={"label": "cdpruner + AutoPrune", "quota": 2}
)
OTHER = case("dart@8")
ON_OTHER = case("dart+autoprune@8", "autoprune", base="dart@8")
QUOTA = case("quota-4@8", "quota", base="cdpruner@8").model_copy(update={"quota": 4})

ALL_CASES = (
    (FULL, RIGHT),
    (BASE, HALF),
    (OURS, RIGHT),
    (OTHER, HALF),
    (ON_OTHER, HALF),
    (QUOTA, HALF),
)


def sections(report: Report) -> dict[str, list[list[str]]]:
    tables: dict[str, list[list[str]]] = {}
    for line in as_markdown(report).splitlines():
        if line.startswith("## "):
            rows = tables.setdefault(line[3:], [])
        elif line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return tables


def test_a_complete_evaluation_has_all_tables_of_the_paper() -> None:
    tables = sections(build_report(contents(*ALL_CASES)))
    assert list(tables) == [
        "K = 8",
        "AutoPrune less strategy only, Acc.",
        "AutoPrune less strategy only, ln p",
        "Sweep of the exchange quota",
    ]
    main = tables["K = 8"]
    assert [row[0] for row in main[2:]] == [
        "full", "cdpruner", "cdpruner + AutoPrune", "dart", "dart+autoprune",
    ]  # fmt: skip
    assert main[3][1:6] == ["50.0", "125.0", "56.2", "56.2", "56.2"]
    assert main[2][6] == "-" and main[4][7].startswith("+43.8 (")
    gains = tables["AutoPrune less strategy only, Acc."][2:]
    assert [row[0] for row in gains] == ["cdpruner", "dart"]
    assert gains[0][1] == main[4][7] and gains[1][1] == "0.0 (0.0 to 0.0)"
    quotas = tables["Sweep of the exchange quota"][2:]
    assert [row[:3] for row in quotas] == [["8", "2", "6"], ["8", "4", "4"]]


def test_a_refused_case_is_in_the_page() -> None:
    journal = contents((FULL, RIGHT))
    journal.add(OURS.model_copy(update={"refused": "K is | too small"}))
    page = as_markdown(build_report(journal))
    assert "## Cannot be served" in page and r"K is \| too small" in page


def test_an_invalid_report_begins_with_the_reasons() -> None:
    journal = contents((FULL, RIGHT))
    journal.add(BASE)
    page = as_markdown(build_report(journal, ["stopped: no server"]))
    assert "Verdict: NOT VALID" in page
    assert "- cdpruner@8: no question was answered" in page and "- stopped: no server" in page


def test_the_page_says_how_many_answers_are_right_with_all_tokens() -> None:
    control = case("resized@8", "resized")
    page = as_markdown(build_report(contents((FULL, RIGHT), (control, HALF), (BASE, HALF))))
    assert "With all tokens, 100.0 % of the answers are right." in page
    assert "not written as the model writes it" not in page
    few = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    page = as_markdown(build_report(contents((FULL, few), (control, few), (BASE, few))))
    assert "With all tokens, 16.7 % of the answers are right." in page
    assert "not written as the model writes it" in page


def test_a_report_on_few_images_calls_itself_a_trial_run() -> None:
    report = build_report(contents(*ALL_CASES))
    assert "Verdict: valid. A trial run: 2 images are too few" in as_markdown(report)
    answer = re.search(r'<p class="answer (\w+)">(.*?)</p>', as_html(report))
    assert answer is not None and answer[1] == "open"
    assert answer[2].startswith("A trial run on 2 images, no measurement: ")


def many_images(*cases: tuple[Case, Sequence[float]]) -> Contents:
    """One question about each of 40 images."""
    questions = [Question(id=str(n), benchmark="colour", image=f"i{n}") for n in range(40)]
    records = [
        Answer(case=one.name, question=question.id, score=score, prompt_tokens=20)
        for one, values in cases
        for question, score in zip(questions, [*values] * 40, strict=False)
    ]
    return Contents([SETUP, *(one for one, _ in cases), *questions, *records])


def test_the_page_answers_first_and_draws_accuracy_over_the_budget() -> None:
    pruned = case("ours@8", "found").model_copy(update={"label": "ours <i>"})
    less = case("ours@4", "found", budget=4).model_copy(update={"label": "ours <i>"})
    cases = ((FULL, [1.0]), (pruned, [1.0, 0.0]), (less, [0.0, 0.0, 0.0, 1.0]))
    page = as_html(build_report(many_images(*cases)))
    answer = re.search(r'<p class="answer (\w+)">(.*?)</p>', page)
    assert answer is not None and answer[1] == "bad" and "trial run" not in page
    assert "ours &lt;i&gt; at K = 8 answers 50.0 % of the questions right, 50.0 points" in answer[2]
    assert len(re.findall(r'id="mark-\d"', page)) == 2 and ">all tokens 100.0 %</text>" in page
    assert "K = 4" in page and "<i>" not in page
    assert {"4", "8"} <= {*re.findall(r">(\d+)</text>", page)}, "the budgets that were measured"


def test_the_page_of_an_invalid_report_says_so_first() -> None:
    journal = contents((FULL, RIGHT))
    journal.add(BASE)
    page = as_html(build_report(journal, ["stopped: <server>"]))
    assert '<p class="answer bad">Not valid' in page and "stopped: &lt;server&gt;" in page


def test_rows_are_compared_with_published_ones_of_the_same_method_and_budget() -> None:
    setup = SETUP.model_copy(update={"backbone": "llava-1.5-7b", "mme_divisor": 20.0})
    journal = contents()
    journal.add(setup)
    cases = [FULL, case("cdpruner@32", budget=32), case("cdpruner@33", budget=33)]
    for one in cases:
        journal.add(one)
        for answer in answers(one.name, RIGHT):
            journal.add(answer)
    for question in QUESTIONS:
        if question.benchmark == "colour":
            journal.add(question.model_copy(update={"benchmark": "POPE"}))
    tables = sections(build_report(journal))
    rows = tables["Ours / published, main, llava-1.5-7b"][2:]
    assert [row[:2] for row in rows] == [["full", "576"], ["CDPruner", "32"]]
    # Only two of ten columns were measured, so Acc. cannot be compared.
    assert rows[1][2:5] == ["100.0 / 87.9", "200.0 / 1373.0", "55.0 / -"]


def test_json_does_not_contain_the_states_of_requests() -> None:
    pruned = BASE.model_copy(update={"pruning": {"state": {"name": "x"}}})
    content = json.loads(as_json(build_report(contents((FULL, RIGHT), (pruned, HALF)))))
    assert content["valid"] is True and content["rows"][1]["case"]["name"] == "cdpruner@8"
    assert "pruning" not in content["rows"][1]["case"]
