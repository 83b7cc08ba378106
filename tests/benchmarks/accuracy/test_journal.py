from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from benchmarks.accuracy.errors import EvaluationError
from benchmarks.accuracy.journal import Contents, Journal, missing, read
from benchmarks.accuracy.records import Answer
from tests.benchmarks.accuracy.samples import FULL, OPENED, QUESTIONS, answers, case

RANDOM = case("random@8", "random")


def written(path: Path) -> None:
    with Journal(path) as journal:
        journal.open_as(OPENED)
        journal.put([FULL, RANDOM, *QUESTIONS])
        journal.put(answers("full", [1.0] * 6))


def test_what_was_put_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    written(path)
    found = read(path)
    assert found.opened == OPENED and list(found.cases.values()) == [FULL, RANDOM]
    assert list(found.questions.values()) == list(QUESTIONS)
    assert [found.answers["full"][q.id].score for q in QUESTIONS] == [1.0] * 6


def test_a_line_that_a_kill_cut_off_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    written(path)
    path.write_bytes(path.read_bytes()[:-20])
    with Journal(path) as journal:
        left = list(missing(journal.contents, [FULL], QUESTIONS))
        journal.put(answers("full", [1.0] * 6))
        assert not list(missing(journal.contents, [FULL], QUESTIONS))
    assert left == [(FULL, QUESTIONS[5])]
    assert len(read(path).answers["full"]) == 6


def test_what_is_there_is_not_written_twice(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    written(path)
    before = path.read_bytes()
    written(path)
    assert path.read_bytes() == before


def test_a_failed_answer_is_missing_and_the_next_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        journal.open_as(OPENED)
        journal.put([Answer(case="full", question="0", failure="503")])
        assert list(missing(journal.contents, [FULL], QUESTIONS[:1])) == [(FULL, QUESTIONS[0])]
        journal.put([Answer(case="full", question="0", score=1.0)])
    found = read(path).answers["full"]["0"]
    assert found.score == 1.0 and found.failure is None


def test_questions_come_image_by_image_with_all_cases_together() -> None:
    order = [(c.name, q.id) for c, q in missing(Contents(), [FULL, RANDOM], QUESTIONS[:2])]
    assert order == [("full", "0"), ("random@8", "0"), ("full", "1"), ("random@8", "1")]


def test_a_refused_case_is_not_asked() -> None:
    refused = FULL.model_copy(update={"refused": "cannot"})
    assert not list(missing(Contents(), [refused], QUESTIONS))


def test_another_evaluation_is_told_by_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    written(path)
    with (
        Journal(path) as journal,
        pytest.raises(EvaluationError, match=r"model, data differ.*--out"),
    ):
        journal.open_as(OPENED.model_copy(update={"model": "x", "data": "y"}))


def test_a_case_that_means_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    written(path)
    other = RANDOM.model_copy(update={"digest": "another"})
    with Journal(path) as journal, pytest.raises(EvaluationError, match="case/random@8"):
        journal.put([other])


def test_two_processes_do_not_write_one_journal(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path), pytest.raises(EvaluationError, match="another evaluation"):
        Journal(path)


def test_a_file_that_is_no_journal_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text('{"kind":"elephant"}\n')
    with pytest.raises(EvaluationError, match="line 1: not a record"):
        Journal(path)


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "j.jsonl", os.write
    written(path)
    before = path.read_bytes()

    def full(handle: int, data: bytes) -> int:
        write(handle, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with Journal(path) as journal:
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            with pytest.raises(EvaluationError, match=r"No space left.*make room and add --resume"):
                journal.put(answers("random@8", [0.0] * 6))
        assert path.read_bytes() == before
        journal.put(answers("random@8", [0.0] * 6))
    assert len(read(path).answers["random@8"]) == 6
