from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluation.samples import FULL, QUESTIONS, SETUP, case, contents, read_journal
from vllm_autoprune.evaluation.journal import Answer, Contents, EvaluationError, Journal, unanswered
from vllm_autoprune.record_file import FrozenModel

RANDOM = case("random@8", "random")
ANSWERS = list(contents((FULL, [1.0] * 6)).answers["full"].values())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        journal.append([SETUP, FULL, RANDOM, *QUESTIONS, *ANSWERS])
    return path


def test_records_are_read_back_and_not_written_twice(path: Path) -> None:
    contents, content = read_journal(path), path.read_bytes()
    assert contents.setup == SETUP and list(contents.cases.values()) == [FULL, RANDOM]
    assert list(contents.questions.values()) == list(QUESTIONS)
    assert list(contents.answers["full"].values()) == ANSWERS
    with Journal(path) as journal:
        journal.append([SETUP, FULL, *QUESTIONS, *ANSWERS])
    assert path.read_bytes() == content


def test_the_question_of_an_incomplete_line_is_unanswered(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])
    with Journal(path) as journal:
        pending = list(unanswered(journal.contents, [FULL], QUESTIONS))
        journal.append(ANSWERS)
        assert not list(unanswered(journal.contents, [FULL], QUESTIONS))
    assert pending == [(FULL, QUESTIONS[5])]
    assert len(read_journal(path).answers["full"]) == 6


def test_a_failed_answer_is_replaced_by_the_next_one(path: Path) -> None:
    with Journal(path) as journal:
        journal.append([Answer(case="random@8", question="0", failure="503")])
        pending = list(unanswered(journal.contents, [RANDOM], QUESTIONS[:1]))
        assert pending == [(RANDOM, QUESTIONS[0])]
        journal.append([Answer(case="random@8", question="0", score=1.0)])
    answer = read_journal(path).answers["random@8"]["0"]
    assert answer.score == 1.0 and answer.failure is None


def test_unanswered_questions_are_grouped_by_question_without_refused_cases() -> None:
    cases = [FULL, RANDOM, case("mine@8", refused="cannot")]
    order = [(c.name, q.id) for c, q in unanswered(Contents(), cases, QUESTIONS[:2])]
    assert order == [("full", "0"), ("random@8", "0"), ("full", "1"), ("random@8", "1")]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (SETUP.model_copy(update={"model": "x", "data": "y"}), r"model, data differ.*--out"),
        (RANDOM.model_copy(update={"digest": "another"}), r"case random@8: digest differ"),
        (QUESTIONS[0].model_copy(update={"image": "z"}), r"question 0: image differ"),
    ],
)
def test_another_evaluation_is_refused(path: Path, record: FrozenModel, message: str) -> None:
    with Journal(path) as journal, pytest.raises(EvaluationError, match=message):
        journal.append([record])  # type: ignore[list-item]


def test_another_start_of_the_server_may_serve_a_refused_case(path: Path) -> None:
    with Journal(path) as journal:
        journal.append([RANDOM.model_copy(update={"refused": "cannot"})])
        journal.append([RANDOM])
    assert read_journal(path).cases["random@8"] == RANDOM
