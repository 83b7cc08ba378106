"""The journal: an append-only JSONL file of records, from which an evaluation can be resumed.

A killed process loses only the requests in flight; the next one asks the questions that are still
unanswered. Failed answers count as unanswered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_autoprune.evaluation.records import (
    RECORD,
    Answer,
    Case,
    EvaluationError,
    Question,
    Record,
    Setup,
    Total,
)
from vllm_autoprune.record_file import RecordFile, read_records

JOURNAL = "samples.jsonl"


class Contents:
    """The records of a journal by kind and name; of several answers to a question the last."""

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self.setup: Setup | None = None
        self.cases: dict[str, Case] = {}
        self.questions: dict[str, Question] = {}
        self.answers: dict[str, dict[str, Answer]] = {}
        self.totals: dict[str, dict[str, Total]] = {}
        self._by_key: dict[str, Record] = {}
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Add one record."""
        self._by_key[record.key] = record
        match record:
            case Setup():
                self.setup = record
            case Case():
                self.cases[record.name] = record
            case Question():
                self.questions[record.id] = record
            case Answer():
                self.answers.setdefault(record.case, {})[record.question] = record
            case Total():
                self.totals.setdefault(record.case, {})[record.benchmark] = record

    def existing(self, record: Record) -> Record | None:
        """The record with the same key, if there is one."""
        return self._by_key.get(record.key)

    def is_answered(self, case: str, question: str) -> bool:
        """Whether a question has an answer that did not fail."""
        answer = self.answers.get(case, {}).get(question)
        return answer is not None and answer.failure is None


class Journal(RecordFile[Record]):
    """A file of records to which one process at a time can append."""

    def __init__(self, path: Path) -> None:
        """Open or create the file; an incomplete last line is removed.

        Raises :class:`EvaluationError` if the file is not a journal, is in use, or cannot be
        written.
        """
        super().__init__(path, RECORD, EvaluationError, exclude_none=True)
        self.contents = Contents(self.records)

    def begin(self, setup: Setup) -> None:
        """Record the set-up; raises :class:`EvaluationError` if the journal has another one."""
        existing = self.contents.setup
        if existing is None:
            self.append([setup])
        elif existing != setup:
            new = setup.model_dump()
            differ = [name for name, value in existing.model_dump().items() if new[name] != value]
            raise EvaluationError(
                f"{self.path}: contains another evaluation ({', '.join(differ)} differ) -> "
                "name another folder with --out"
            )

    def append(self, records: Sequence[Record]) -> None:
        """Append the records that are new, in one write.

        Raises :class:`EvaluationError` if a case or a question differs from its earlier record, or
        if the file cannot be written. Whether a server refuses a case may differ: another start of
        the server may serve it.
        """
        new = []
        for record in records:
            existing = self.contents.existing(record)
            if existing == record:
                continue
            if isinstance(existing, Case) and isinstance(record, Case):
                existing = existing.model_copy(update={"refused": record.refused})
                may_differ = existing == record
            else:
                may_differ = existing is None or not isinstance(record, Question | Setup)
            if not may_differ:
                raise EvaluationError(
                    f"{self.path}: {record.key} differs from the one recorded before -> name "
                    "another folder with --out"
                )
            new.append(record)
        if not new:
            return
        super().append(new)
        for record in new:
            self.contents.add(record)


def read_journal(path: Path) -> Contents:
    """Read a journal without opening it for writing; raises :class:`EvaluationError`."""
    return Contents(read_records(path, RECORD, EvaluationError, "name a folder with --out"))


def unanswered(
    contents: Contents, cases: Sequence[Case], questions: Sequence[Question]
) -> Iterator[tuple[Case, Question]]:
    """Unanswered questions of all cases; all cases of one question are consecutive."""
    for question in questions:
        for case in cases:
            if not case.refused and not contents.is_answered(case.name, question.id):
                yield case, question
