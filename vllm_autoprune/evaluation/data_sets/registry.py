"""Registry of readers of records, which are chosen by the columns that a record has."""

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
"""Largest number of file names in a note."""


class DataFile:
    """State that the records of a file share: picture sources, and what is not asked or read."""

    def __init__(self, *folders: Path) -> None:
        self.folders = [*folders]
        self._sources: dict[str, PictureSource | ConfigError] = {}
        self.rows: dict[str, list[PictureSource]] = {}
        """Pictures of a table's rows by row index; a later row may refer to them by that index."""
        self.left_out: Counter[str] = Counter()
        """Number of records that are not asked, by reason."""
        self.passed_over: dict[str, None] = {}
        """Columns that no question uses, in order of appearance."""
        self.unread: list[str] = []
        """Files and folders in a picture folder that no question is about."""

    def find(self, where: str, text: str) -> PictureSource:
        """The source of the picture that ``text`` names or contains, which is looked up once.

        Raises :class:`ConfigError`, always with the place of the first record that had ``text``.
        """
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
        """Add the pictures at any depth of ``folder`` that no record names to :attr:`unread`."""
        addresses = {
            source.address
            for source in self._sources.values()
            if isinstance(source, PictureSource)
        }
        for path in sorted(folder.rglob("*")):
            if is_picture(path) and str(path) not in addresses:
                self.unread.append(one_line(path.relative_to(folder), 80))

    def notes(self) -> list[str]:
        """Sentences about the records, columns and files that no question comes from."""
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
    """A record of a file, with its place and the state that it shares with other records."""

    where: str
    fields: Mapping[str, Any]
    """Values by column; None where a value is missing."""
    file: DataFile

    def existing(self, *names: str) -> str | None:
        """The first of ``names`` that is a file or folder in the folders of the data, or None."""
        for name in names:
            for folder in self.file.folders:
                # OSError: the name is too long; ValueError: it has a NUL.
                with contextlib.suppress(OSError, ValueError):
                    if (folder / name).exists():
                        return name
        return None


Reader = Callable[[Record], AskedQuestion | str]
"""Function from a record to its question, or to the reason why it is left out."""


class Layout(NamedTuple):
    """Conditions by which records of a data set are recognised, and their reader."""

    columns: frozenset[str]
    """Columns that a record must have."""
    without: frozenset[str]
    """Columns that it must not have."""
    others: frozenset[str]
    """Columns that it may have."""
    when: Mapping[str, Collection[str]]
    """Allowed values, as text, of columns in which not every value is allowed."""
    read: Reader

    def matches(self, fields: Mapping[str, Any]) -> bool:
        """Whether a record with these ``fields`` is of this data set."""
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
    """Register the decorated reader for records that match a :class:`Layout` of these arguments.

    Names of columns are separated by spaces. A record that matches several data sets is read as
    the one with the most ``columns``.
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


# ---- this project's own form, to which every data set is converted ----

Text = Annotated[str, StringConstraints(pattern=r"\S")]  # not blank


def list_texts(value: object) -> list[object]:
    """``value`` as a list of texts, in which a box of four numbers is one text.

    It may be None, one item or a list; an item is a text or an object with an ``answer``.
    """
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
    """``value`` as a list of pictures or videos, each of them by its path or URL.

    It may be None, one item or a list; an item is a text or an object with ``path`` or ``url``.
    """
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [
        item.get("path") or item.get("url") or item if isinstance(item, dict) else item
        for item in values
        if item is not None
    ]


_Media = Annotated[tuple[Text, ...], BeforeValidator(list_media)]
_Texts = Annotated[tuple[Text, ...], BeforeValidator(list_texts)]


class Line(FrozenModel):
    """A question in this project's form, which is one record of a file."""

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
        """Refuse two names of one field, and take four numbers in ``answer`` for one box."""
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
    """Make a question of ``fields``, which are those of :class:`Line`; None counts as absent.
    ``accepted`` replaces the answers in ``fields``. Ten answers are scored by VQAv2's rule in
    place of ``text``.
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
    """The fields of ``record`` in this project's columns; other columns are noted as unused."""
    fields = dict[str, object]()
    for name, value in record.fields.items():
        if name in _OWN:
            fields[name] = value
        elif value is not None:
            record.file.passed_over[name] = None
    return fields


def make_own(record: Record) -> AskedQuestion:
    """The question of a record in this project's form."""
    return make_question(record, find_own_fields(record))


def usual_rule(answer: object) -> Rule:
    """The rule for a published answer: ``yes_no`` if it is yes or no, else ``text``."""
    return "yes_no" if str(answer).strip().lower() in ("yes", "no") else "text"


def read_record(where: str, record: Any, file: DataFile) -> AskedQuestion | str:
    """The question of ``record``, or the reason why it is left out.

    The reader is that of the layout that the record matches, else :func:`make_own`. Raises
    :class:`ConfigError`, or pydantic's ``ValidationError`` for wrong fields.
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
