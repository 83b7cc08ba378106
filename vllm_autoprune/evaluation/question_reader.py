"""Reads the questions of a file or folder, and reports every problem with its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.asked_question import AskedQuestion
from vllm_autoprune.evaluation.data_folders import METADATA, find_record_files
from vllm_autoprune.evaluation.data_sets.conversations import unwrap_request
from vllm_autoprune.evaluation.data_sets.registry import (
    DataFile,
    known_columns,
    read_record,
)
from vllm_autoprune.evaluation.picture_folder import read_folder
from vllm_autoprune.evaluation.records import FORM, read_records

_MEANINGS = {
    "missing": "is missing",
    "extra_forbidden": "is not a known field",
    "string_type": "is not text",
    "string_pattern_mismatch": "is blank",
    "model_type": "is not an object",
    "too_short": "is empty",
}


class QuestionReader:
    """Reader of one file or folder, whose pictures are beside it or in ``images``."""

    def __init__(self, path: Path, images: Path | None, fix: str) -> None:
        self.path = path
        self._fix = fix
        beside = path if path.is_dir() else path.parent
        self._images = images
        self.file = DataFile(images or beside)

    def read(self, problems: list[Problem]) -> Iterator[AskedQuestion]:
        """The questions, with the sources of their pictures; problems are added to ``problems``."""
        try:
            files: Sequence[Path] = [self.path]
            if self.path.is_dir():
                files = find_record_files(self.path)
                if not files:
                    yield from read_folder(self.path, self.file, problems, self._fix)
            for file in files:
                if self._images is None and file.parent not in self.file.folders:
                    self.file.folders.append(file.parent)
                yield from self._read_file(file, problems)
                if file.name in METADATA:
                    self.file.note_unread(file.parent)
        except ConfigError as error:
            problems += error.problems
        except OSError as error:  # the folder cannot be listed
            what = f"cannot be read ({error.strerror})"
            problems.append(Problem(str(error.filename), what, self._fix))

    def _read_file(
        self, path: Path, problems: list[Problem]
    ) -> Iterator[AskedQuestion]:
        for where, record in read_records(path, self._fix, known_columns()):
            try:
                question = self._read_record(where, record)
            except ConfigError as error:
                problems += error.problems
            except ValidationError as error:
                problems.append(Problem(where, _explain(error), FORM))
            else:
                if isinstance(question, AskedQuestion):
                    yield question
                else:
                    self.file.left_out[question] += 1

    def _read_record(self, where: str, record: Any) -> AskedQuestion | str:
        """The question of a record, or the reason why it is left out."""
        if isinstance(record, Problem):
            raise ConfigError("data", [record])
        return read_record(where, unwrap_request(record), self.file)


def _explain(error: ValidationError) -> str:
    """What is wrong with the fields of a record, without repetitions."""
    meanings = dict[str, str]()
    for detail in error.errors(include_url=False):
        name = "".join(f"{str(field)[:40]!r} " for field in detail["loc"][:1])
        reason = detail["msg"].removeprefix("Value error, ")
        meanings.setdefault(name, _MEANINGS.get(detail["type"], reason))
    return "; ".join(f"{name}{meaning}" for name, meaning in meanings.items())
