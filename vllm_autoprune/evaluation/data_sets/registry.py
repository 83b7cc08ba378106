"""Registry of the readers of records: a data set is recognised by the columns that it has."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AliasChoices, BeforeValidator, Field, StringConstraints

from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.answers import Rule
from vllm_autoprune.evaluation.asked_question import AskedQuestion, ask
from vllm_autoprune.evaluation.pictures import PictureSource, find_picture
from vllm_autoprune.record_file import FrozenModel


class PictureFinder:
    """Sources of the pictures that the records of one file name, each found once."""

    def __init__(self, *folders: Path) -> None:
        self.folders = folders
        self._sources: dict[str, PictureSource | None] = {}
        self.rows: dict[str, list[PictureSource]] = {}
        """Pictures of the rows of a table by index, which later rows may name in their place."""

    def find(self, where: str, text: str) -> PictureSource:
        """The source of a picture; a problem with it is raised once, then without words."""
        key = text if len(text) < 4096 else hashlib.sha256(text.encode()).hexdigest()
        if key not in self._sources:
            self._sources[key] = None
            image = f"{where}: image {text[:80]!r}"
            self._sources[key] = find_picture(image, text, *self.folders)
        if (source := self._sources[key]) is None:
            raise ConfigError("image", [])
        return source


class Record(NamedTuple):
    """A record of a file, and the finder of its pictures."""

    where: str
    fields: Any
    """A mapping by column, unless the file has something else in its place."""
    pictures: PictureFinder


Reader = Callable[[Record], AskedQuestion | None]
"""The question of a record; None for a chat request without a picture."""


class Layout(NamedTuple):
    """Columns that recognise records of a data set, those that it never has, and its reader."""

    columns: frozenset[str]
    without: frozenset[str]
    read: Reader

    def matches(self, fields: Mapping[str, Any]) -> bool:
        """Whether a record has all of the columns, and none that the data set never has."""
        return self.columns <= fields.keys() and self.without.isdisjoint(fields)


_LAYOUTS: list[Layout] = []
"""In the order in which they are tried."""


def data_set(*columns: str, without: str = "") -> Callable[[Reader], Reader]:
    """Register the reader of records that have all of these columns."""

    def register(read: Reader) -> Reader:
        _LAYOUTS.append(Layout(frozenset(columns), frozenset(without.split()), read))
        return read

    return register


# ---- this project's own form, which every data set is read into ----

Text = Annotated[str, StringConstraints(pattern=r"\S")]  # not blank


def list_texts(value: object) -> list[object]:
    """A text, a list of texts, or of objects with an answer, as a list."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [item.get("answer") if isinstance(item, dict) else item for item in values]


_Texts = Annotated[tuple[Text, ...], BeforeValidator(list_texts)]


class Line(FrozenModel):
    """One question of a file in this project's form."""

    image: _Texts = Field(
        validation_alias=AliasChoices("image", "images", "video", "videos"),
        min_length=1,
    )
    question: Text
    answer: _Texts = Field(
        default=(), validation_alias=AliasChoices("answer", "answers")
    )
    category: Text = "all"
    pair: int | None = None


def make_question(
    record: Record, fields: object, rule: Rule = "text", accepted: tuple[str, ...] = ()
) -> AskedQuestion:
    """The question of a record whose fields are those of :class:`Line`; ten answers are VQAv2's.

    ``accepted``: the answer as an option's letter and as its text, where there are options.
    """
    line = Line.model_validate(fields)
    pictures = record.pictures
    if not (sources := pictures.rows.get(line.image[0])):
        sources = [pictures.find(record.where, text) for text in line.image]
    answers = accepted or line.answer
    return AskedQuestion(
        record.where,
        ask(line.question, *sources),
        answers,
        "vqa" if len(answers) == 10 else rule,
        line.category,
        line.pair,
    )


def make_known(
    record: Record, accepted: tuple[str, ...] = (), **fields: object
) -> AskedQuestion:
    """The question of a data set, of which what is None is missing; yes and no are first words."""
    rule: Rule = "text"
    if accepted:
        rule = "choice"
    elif str(fields.get("answer")).strip().lower() in ("yes", "no"):
        rule = "yes_no"
    present = {name: value for name, value in fields.items() if value is not None}
    return make_question(record, present, rule, accepted)


def read_record(record: Record) -> AskedQuestion | None:
    """The question of a record by the first layout that it matches, else in the project's form.

    Raises :class:`ConfigError`, or pydantic's ``ValidationError`` for wrong fields.
    """
    if isinstance(record.fields, dict):
        for layout in _LAYOUTS:
            if layout.matches(record.fields):
                return layout.read(record)
    return make_question(record, record.fields)
