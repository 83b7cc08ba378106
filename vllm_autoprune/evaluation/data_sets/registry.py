"""Registry of the readers of records: a data set is recognised by all of its columns."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Field,
    StringConstraints,
    model_validator,
)

from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.answers import Rule
from vllm_autoprune.evaluation.asked_question import AskedQuestion, ask
from vllm_autoprune.evaluation.pictures import (
    PictureSource,
    find_picture,
    is_picture,
)
from vllm_autoprune.evaluation.tables import is_box, rename
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.stream import one_line

_SHOWN = 20
"""Names of files in a note."""


class DataFile:
    """What the records of one file share: sources of their pictures, and what is passed over."""

    def __init__(self, *folders: Path) -> None:
        self.folders = [*folders]
        self._sources: dict[str, PictureSource | ConfigError] = {}
        self.rows: dict[str, list[PictureSource]] = {}
        """Pictures of the rows of a table by index, which later rows may name in their place."""
        self.left_out: Counter[str] = Counter()
        """Records by the reason why they are not asked."""
        self.passed_over: dict[str, None] = {}
        """Columns that no question has, in order."""
        self.unread: list[str] = []
        """Files and folders in a folder of pictures that no question is about."""

    def find(self, where: str, text: str) -> PictureSource:
        """The source of a picture; a problem with it is that of the first place again."""
        key = text if len(text) < 4096 else hashlib.sha256(text.encode()).hexdigest()
        if key not in self._sources:
            image = f"{where}: image {text[:80]!r}"
            try:
                self._sources[key] = find_picture(image, text, *self.folders)
            except ConfigError as error:
                self._sources[key] = error
        source = self._sources[key]
        if isinstance(source, ConfigError):
            raise source
        return source

    def note_unread(self, folder: Path) -> None:
        """Note the pictures in a folder and those in it that no record has named."""
        addresses = {
            source.address
            for source in self._sources.values()
            if isinstance(source, PictureSource)
        }
        for path in sorted(folder.rglob("*")):
            if is_picture(path) and str(path) not in addresses:
                self.unread.append(one_line(path.relative_to(folder), 80))

    def notes(self) -> list[str]:
        """What is not asked, in words."""
        notes = [
            f"left out {count} {reason}" for reason, count in self.left_out.items()
        ]
        names = [
            one_line(repr(name), 60) if name else "one without a name"
            for name in self.passed_over
        ]
        if names:
            notes.append(
                f"passed over columns that no question has: {', '.join(names)}"
            )
        if files := self.unread:
            shown = ", ".join(files[:_SHOWN]) + ", ..." * (len(files) > _SHOWN)
            note = (
                f"passed over files that no question is about ({len(files)}): {shown}"
            )
            if any(file.lower().endswith((".heic", ".heif")) for file in files):
                note += " (pip install 'vllm-autoprune[data]' reads HEIC)"
            notes.append(note)
        return notes


class Record(NamedTuple):
    """A record of a file; its place, and what it shares with the others."""

    where: str
    fields: Mapping[str, Any]
    """By column; None where a value is missing."""
    file: DataFile

    def existing(self, *names: str) -> str | None:
        """The first of these names that is a file or a folder of the data."""
        for name in names:
            for folder in self.file.folders:
                with contextlib.suppress(OSError, ValueError):  # a long name, a NUL
                    if (folder / name).exists():
                        return name
        return None


Reader = Callable[[Record], AskedQuestion | str]
"""The question of a record, or why it is left out."""


class Layout(NamedTuple):
    """What recognises the records of a data set, and their reader."""

    columns: frozenset[str]
    """All are there."""
    without: frozenset[str]
    """None is there."""
    others: frozenset[str]
    """Some may be there."""
    when: Mapping[str, Collection[str]]
    """Columns whose values are among these."""
    read: Reader

    def matches(self, fields: Mapping[str, Any]) -> bool:
        """Whether a record is of this data set."""
        return (
            self.columns <= fields.keys()
            and self.without.isdisjoint(fields)
            and all(str(fields[name]) in values for name, values in self.when.items())
        )


_LAYOUTS: list[Layout] = []


def data_set(
    columns: str,
    *,
    others: str = "",
    without: str = "",
    when: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> Callable[[Reader], Reader]:
    """Register the reader of records that have all of these columns, and perhaps others.

    Of two data sets that a record has the columns of, it is the one with more.
    """

    def register(read: Reader) -> Reader:
        layout = Layout(
            frozenset(columns.split()),
            frozenset(without.split()),
            frozenset(others.split()),
            when,
            read,
        )
        _LAYOUTS.append(layout)
        _LAYOUTS.sort(key=lambda layout: -len(layout.columns))
        return read

    return register


# ---- this project's own form, which every data set is read into ----

Text = Annotated[str, StringConstraints(pattern=r"\S")]  # not blank


def list_texts(value: object) -> list[object]:
    """A text, a list of texts, or of objects with an answer, as a list; a box is one text."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    texts = (
        item.get("answer", item) if isinstance(item, dict) else item for item in values
    )
    return [
        _join_box(item) if is_box(item) else item for item in texts if item is not None
    ]


def _join_box(numbers: list[str]) -> str:
    return f"[{', '.join(numbers)}]"


def list_media(value: object) -> list[object]:
    """The names of pictures or videos, each a text or an object with its path or address."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [
        item.get("path") or item.get("url") or item if isinstance(item, dict) else item
        for item in values
        if item is not None
    ]


_Media = Annotated[tuple[Text, ...], BeforeValidator(list_media)]
_Texts = Annotated[tuple[Text, ...], BeforeValidator(list_texts)]


class Line(FrozenModel):
    """One question of a file in this project's form."""

    image: _Media = Field(
        validation_alias=AliasChoices("image", "images", "video", "videos"),
        min_length=1,
    )
    question: Text
    answer: _Texts = Field(
        default=(), validation_alias=AliasChoices("answer", "answers")
    )
    category: Text = "all"
    pair: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, fields: Any) -> Any:
        """Refuse two names of one field; under ``answer``, four numbers are a box."""
        if not isinstance(fields, dict):
            return fields
        for names in (("image", "images", "video", "videos"), ("answer", "answers")):
            present = [repr(name) for name in names if name in fields]
            if len(present) > 1:
                raise ValueError(
                    f"has {' and '.join(present)}, of which one can be read"
                )
        if is_box(fields.get("answer")):
            return {**fields, "answer": [fields["answer"]]}
        return fields


_OWN = frozenset(
    "image images video videos question answer answers category pair".split()  # noqa: SIM905
)


def known_columns() -> frozenset[str]:
    """Columns of all data sets and of this project's form."""
    layouts = (layout.columns | layout.others for layout in _LAYOUTS)
    return _OWN.union(*layouts)


def make_question(
    record: Record,
    fields: Mapping[str, object],
    rule: Rule = "text",
    accepted: Sequence[str] = (),
) -> AskedQuestion:
    """The question of a record whose fields are those of :class:`Line`; None is missing.

    ``accepted`` are in the place of its answers. Ten answers are scored as VQAv2's.
    """
    present = {name: value for name, value in fields.items() if value is not None}
    line = Line.model_validate(present)
    if not (sources := record.file.rows.get(line.image[0])):
        sources = [record.file.find(record.where, text) for text in line.image]
    answers = tuple(accepted) or line.answer
    turns = ask(line.question, *sources)
    rule = "vqa" if len(answers) == 10 and rule == "text" else rule
    return AskedQuestion(record.where, turns, answers, rule, line.category, line.pair)


def find_own_fields(record: Record) -> dict[str, object]:
    """The fields of a record in this project's columns; others are passed over and named."""
    fields = dict[str, object]()
    for name, value in record.fields.items():
        if name in _OWN:
            fields[name] = value
        elif value is not None:
            record.file.passed_over[name] = None
    return fields


def make_own(record: Record) -> AskedQuestion:
    """The question of a record in this project's columns."""
    return make_question(record, find_own_fields(record))


def usual_rule(answer: object) -> Rule:
    """Of a published answer: yes and no are first words."""
    return "yes_no" if str(answer).strip().lower() in ("yes", "no") else "text"


def read_record(where: str, record: Any, file: DataFile) -> AskedQuestion | str:
    """The question of a record by the layout that it matches, else in the project's form.

    Raises :class:`ConfigError`, or pydantic's ``ValidationError`` for wrong fields.
    """
    if not isinstance(record, dict):
        Line.model_validate(record)
    names = rename(record, known_columns())
    fields = record
    if len({*names}) == len(record):
        fields = dict(zip(names, record.values(), strict=True))
    for layout in _LAYOUTS:
        if layout.matches(fields):
            return layout.read(Record(where, fields, file))
    return make_own(Record(where, fields, file))
