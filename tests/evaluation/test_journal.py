from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluation.samples import FULL, QUESTIONS, SETUP, answers, case, read_journal
from vllm_autoprune.evaluation.journal import (
    Answer,
    Contents,
    EvaluationError,
    Journal,
    unanswered,
)

RANDOM = case("random@8", "random")


def write_journal(path: Path) -> None:
    with Journal(path) as journal:
        journal.begin(SETUP)
        journal.append([FULL, RANDOM, *QUESTIONS])
        journal.append(answers("full", [1.0] * 6))


def test_records_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write_journal(path)
    contents = read_journal(path)
    assert contents.setup == SETUP and list(contents.cases.values()) == [FULL, RANDOM]
    assert list(contents.questions.values()) == list(QUESTIONS)
    assert [contents.answers["full"][q.id].score for q in QUESTIONS] == [1.0] * 6


def test_the_question_of_an_incomplete_line_is_unanswered(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write_journal(path)
    path.write_bytes(path.read_bytes()[:-20])
    with Journal(path) as journal:
        pending = list(unanswered(journal.contents, [FULL], QUESTIONS))
        journal.append(answers("full", [1.0] * 6))
        assert not list(unanswered(journal.contents, [FULL], QUESTIONS))
    assert pending == [(FULL, QUESTIONS[5])]
    assert len(read_journal(path).answers["full"]) == 6


def test_existing_records_are_not_written_twice(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write_journal(path)
    before = path.read_bytes()
    write_journal(path)
    assert path.read_bytes() == before


def test_a_failed_answer_is_replaced_by_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        journal.begin(SETUP)
        journal.append([Answer(case="full", question="0", failure="503")])
        assert list(unanswered(journal.contents, [FULL], QUESTIONS[:1])) == [(FULL, QUESTIONS[0])]
        journal.append([Answer(case="full", question="0", score=1.0)])
    answer = read_journal(path).answers["full"]["0"]
    assert answer.score == 1.0 and answer.failure is None


def test_unanswered_questions_are_grouped_by_question() -> None:
    order = [(c.name, q.id) for c, q in unanswered(Contents(), [FULL, RANDOM], QUESTIONS[:2])]
    assert order == [("full", "0"), ("random@8", "0"), ("full", "1"), ("random@8", "1")]


def test_a_refused_case_has_no_unanswered_questions() -> None:
    refused = FULL.model_copy(update={"refused": "cannot"})
    assert not list(unanswered(Contents(), [refused], QUESTIONS))


def test_another_evaluation_is_refused_with_its_differences(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write_journal(path)
    with (
        Journal(path) as journal,
        pytest.raises(EvaluationError, match=r"model, data differ.*--out"),
    ):
        journal.begin(SETUP.model_copy(update={"model": "x", "data": "y"}))


def test_a_case_that_differs_from_its_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write_journal(path)
    other = RANDOM.model_copy(update={"digest": "another"})
    with Journal(path) as journal, pytest.raises(EvaluationError, match="case/random@8"):
        journal.append([other])
