"""Questions of a file or folder, each problem with its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.asked_question import AskedQuestion
from vllm_autoprune.evaluation.data_sets.conversations import unwrap_request
from vllm_autoprune.evaluation.data_sets.registry import (
    PictureFinder,
    Record,
    read_record,
)
from vllm_autoprune.evaluation.picture_folder import read_folder
from vllm_autoprune.evaluation.records import read_records

_FORM = (
    'write one object a line: {"image": "a.png", "question": "...", "answer": "..."}, or "video", '
    'with "category" as text and "pair" as a whole number where wanted'
)
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
        self._pictures = PictureFinder(images or beside)
        self.without_picture = 0
        """Chat requests that are left out."""

    def read(self, problems: list[Problem]) -> Iterator[AskedQuestion]:
        """The questions, with the sources of their pictures; problems are added to ``problems``."""
        try:
            if self.path.is_dir():
                yield from read_folder(self.path, problems, self._fix)
                return
            for where, fields in read_records(self.path, self._fix):
                try:
                    question = self._read_record(where, fields)
                except ConfigError as error:
                    problems += error.problems
                except ValidationError as error:
                    problems.append(Problem(where, _explain(error), _FORM))
                else:
                    if question is not None:
                        yield question
                    self.without_picture += question is None
        except ConfigError as error:
            problems += error.problems
        except OSError as error:  # of the folder
            what = f"cannot be read ({error.strerror})"
            problems.append(Problem(str(error.filename), what, self._fix))

    def _read_record(self, where: str, fields: Any) -> AskedQuestion | None:
        """The question of a record; None for a chat request without a picture."""
        if isinstance(fields, ValueError):
            reason = str(fields).replace(" at line 1 column ", " at column ")
            raise ConfigError.of(
                where, f"is not JSON ({reason})", _FORM, subject="data"
            )
        return read_record(Record(where, unwrap_request(fields), self._pictures))


def _explain(error: ValidationError) -> str:
    """What is wrong with the fields of a record, each said once."""
    meanings = dict[str, str]()
    for detail in error.errors(include_url=False):
        name = "".join(f"{str(field)[:40]!r} " for field in detail["loc"][:1])
        meanings.setdefault(name, _MEANINGS.get(detail["type"], detail["msg"]))
    return "; ".join(f"{name}{meaning}" for name, meaning in meanings.items())
