"""The journal: an append-only JSONL file with every sample, the only thing an evaluation remembers.

Knows nothing about what is asked. A process that is killed loses what was in flight and no more:
the next one asks what is missing. Answers that failed count as missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from benchmarks.accuracy.errors import EvaluationError
from benchmarks.accuracy.records import (
    RECORD,
    Answer,
    Case,
    Opened,
    Question,
    Record,
    Total,
)
from offline_search.ledger.record_file import FileErrors, RecordFile, read_records

JOURNAL = "samples.jsonl"

_WORDING = FileErrors(
    error_type=EvaluationError,
    file_label="",
    writer="another evaluation",
    fix_locked="wait for it, or name another --out",
    fix_disk_full="make room and add --resume: everything up to here is kept",
    fix_inaccessible="name a folder that can be written with --out",
    fix_invalid_line="name another folder with --out, or use the version that wrote it",
)


class Contents:
    """What a journal holds, in the order it came; of answers to one question the last."""

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self.opened: Opened | None = None
        self.cases: dict[str, Case] = {}
        self.questions: dict[str, Question] = {}
        self.answers: dict[str, dict[str, Answer]] = {}
        self.totals: dict[str, dict[str, Total]] = {}
        for record in records:
            self.take(record)

    def take(self, record: Record) -> None:
        """Remember one more."""
        match record:
            case Opened():
                self.opened = record
            case Case():
                self.cases[record.name] = record
            case Question():
                self.questions[record.id] = record
            case Answer():
                self.answers.setdefault(record.case, {})[record.question] = record
            case Total():
                self.totals.setdefault(record.case, {})[record.benchmark] = record

    def known(self, record: Record) -> Record | None:
        """The record that has this one's place."""
        match record:
            case Opened():
                return self.opened
            case Case():
                return self.cases.get(record.name)
            case Question():
                return self.questions.get(record.id)
            case Answer():
                return self.answers.get(record.case, {}).get(record.question)
            case Total():
                return self.totals.get(record.case, {}).get(record.benchmark)

    def answered(self, case: str, question: str) -> bool:
        """Whether there is an answer that did not fail."""
        answer = self.answers.get(case, {}).get(question)
        return answer is not None and answer.failure is None


class Journal:
    """A file of records that one process at a time adds to."""

    def __init__(self, path: Path) -> None:
        """Open or create; a last line that a kill cut off is removed.

        Raises :class:`EvaluationError` for a file that is no journal, is in use, or cannot be
        written.
        """
        self.path = path
        self._file = RecordFile(path, RECORD, _WORDING)
        self.contents = Contents(self._file.records)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def open_as(self, opened: Opened) -> None:
        """State what is measured; raises :class:`EvaluationError` where it is something else."""
        known = self.contents.opened
        if known is None:
            self.put([opened])
        elif known != opened:
            said = opened.model_dump()
            differ = [name for name, value in known.model_dump().items() if said[name] != value]
            raise EvaluationError(
                f"{self.path}: holds another evaluation ({', '.join(differ)} differ) -> "
                "name another folder with --out"
            )

    def put(self, records: Sequence[Record]) -> None:
        """Append records in one write; those that are there already are not written again.

        Raises :class:`EvaluationError` where a case or a question says something else than before,
        or where the disk does not take them.
        """
        new = []
        for record in records:
            known = self.contents.known(record)
            if known == record:
                continue
            if known is not None and isinstance(record, Case | Question | Opened):
                raise EvaluationError(
                    f"{self.path}: {record.key} is not what it was when this began -> name another "
                    "folder with --out"
                )
            new.append(record)
        if not new:
            return
        self._file.append(new, exclude_none=True)
        for record in new:
            self.contents.take(record)


def read(path: Path) -> Contents:
    """A journal that nobody has to be writing; raises :class:`EvaluationError`."""
    return Contents(read_records(path, RECORD, _WORDING))


def missing(
    contents: Contents, cases: Sequence[Case], questions: Sequence[Question]
) -> Iterator[tuple[Case, Question]]:
    """What is not answered yet, question by question, so that one image's requests are together."""
    for question in questions:
        for case in cases:
            if not case.refused and not contents.answered(case.name, question.id):
                yield case, question
