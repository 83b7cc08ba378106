"""Rows of TSV and CSV as people and spreadsheets write them."""

from __future__ import annotations

import ast
import csv
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from vllm_autoprune.errors import ConfigError

_DELIMITERS = "\t,;|"
_MISSING = ("nan", "NaN", "<NA>")
"""Cells that pandas writes where it has no value. "None" and "NA" may be answers."""
_LISTS = {
    "answer",
    "answers",
    "candidates",
    "choices",
    "direct_answers",
    "image",
    "image_path",
    "images",
    "option",
    "options",
    "video",
    "videos",
}
"""Columns whose cells may hold a list."""


class Number(str):
    """A number, kept as the text that the file has."""

    __slots__ = ()


def is_box(value: object) -> TypeGuard[list[str]]:
    """Whether ``value`` is a list of four numbers, which is a box and thus one answer."""
    return (
        isinstance(value, list)
        and len(value) == 4
        and all(isinstance(item, Number) for item in value)
    )


class Header(NamedTuple):
    """Columns of a table, the line on which its rows begin, and the separator of its cells."""

    columns: Sequence[str]
    number: int
    delimiter: str


def read_header(
    path: Path,
    beginning: tuple[int, str],
    numbered: Iterator[tuple[int, str]],
    known: Collection[str],
    *,
    is_table: bool,
) -> Header | None:
    """The header of a table, which may follow Excel's ``sep=``; None if the text is no table.

    Its separator is the one that gives most names in ``known``; csv.Sniffer ignores names and
    would split questions at commas. A table needs two known names, or one if ``is_table``. Raises
    :class:`ConfigError` for a repeated column, or a table without known columns.
    """
    number, line = beginning
    delimiters = _DELIMITERS
    if match := re.fullmatch(r'"?sep=(.)"?', line.strip("\r\n"), re.IGNORECASE):
        delimiters = match[1]
        is_table = True
        number, line = next(numbered, (number, ""))
    if line.lstrip()[:1] in ("", "{", "["):
        return None
    candidates = [
        Header(rename(next(csv.reader([line], delimiter=mark)), known), number, mark)
        for mark in delimiters
    ]
    header = max(candidates, key=lambda header: _count(header, known))
    count = _count(header, known)
    if count == 0 and is_table:
        what = f"has no column of questions: {line.strip()[:200]}"
        fix = "name the columns image, question and answer"
        raise ConfigError.of(f"{path}:{number}", what, fix, subject="data")
    if count < 2 - is_table:
        return None
    for name in header.columns:
        if name and header.columns.count(name) > 1:
            what = f"has two columns {name!r}"
            fix = "rename one of them"
            raise ConfigError.of(f"{path}:{number}", what, fix, subject="data")
    return header


def _count(header: Header, known: Collection[str]) -> int:
    return len({*header.columns} & {*known})


def rename(names: Iterable[str], known: Collection[str]) -> list[str]:
    """``names`` of columns, spelled as in ``known`` if they are known."""
    by_letters = {name.casefold(): name for name in sorted(known)}
    stripped = [name.strip() for name in names]
    return [
        name if name in known else by_letters.get(name.casefold(), name)
        for name in stripped
    ]


def read_rows(
    header: Header, lines: Iterable[str]
) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Rows as dictionaries, each with its line number; a malformed row is the text of its problem.

    Missing cells are None. Quotes are read strictly, because an open quote would swallow the rows
    after it.
    """
    csv.field_size_limit(1 << 31)
    rows = csv.reader(
        lines, delimiter=header.delimiter, skipinitialspace=True, strict=True
    )
    number = header.number + 1
    try:
        for cells in rows:
            if any(cell.strip() for cell in cells) and not _is_comment(header, cells):
                yield number, _read_cells(header, cells)
            number = header.number + rows.line_num + 1
    except csv.Error as error:
        yield (
            number,
            f"has quotes that do not end its cell ({error}): double those in it",
        )


def _is_comment(header: Header, cells: Sequence[str]) -> bool:
    return len(cells) == 1 < len(header.columns) and cells[0].startswith("#")


def _read_cells(header: Header, cells: Sequence[str]) -> dict[str, Any] | str:
    """The cells of a row by column, or the problem of the row."""
    count = len(header.columns)
    if any(cell.strip() for cell in cells[count:]):
        return f"has {len(cells)} cells, and the header {count}"
    return {
        name: _read_cell(name, cell)
        for name, cell in zip(header.columns, cells, strict=False)
    } | dict.fromkeys(header.columns[len(cells) :])


def _read_cell(name: str, cell: str) -> object:
    """The stripped text of a cell, the list that it holds, or None if it is empty."""
    text = cell.strip()
    if not text or text in _MISSING:
        return None
    if name in _LISTS and text[0] == "[" and text[-1] == "]":
        value = read_list(text)
        if value is not None and not (name == "answer" and is_box(value)):
            return value
    return text


def read_list(text: str) -> list[Any] | None:
    """Parse a list as JSON, Python or numpy writes it; returns None for any other text."""
    try:
        value = json.loads(text, parse_int=Number, parse_float=Number)
    except ValueError:
        # numpy writes no commas, and Python would join adjacent texts.
        separated = re.sub(r"""(['"])\s+(?=['"])""", r"\1, ", text)
        try:
            value = ast.literal_eval(separated)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    except RecursionError:
        return None
    if not isinstance(value, list):
        return None
    return [Number(item) if type(item) in (int, float) else item for item in value]
