"""Records of files: JSON lines, one JSON document, TSV and CSV.

Every problem is reported with its line or record; no other exception is raised.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.arrow_files import is_arrow, read_arrow
from vllm_autoprune.evaluation.tables import Header, Number, read_header, read_rows

FORM = (
    'write one object a line: {"image": "a.png", "question": "...", "answer": "..."}, or "video", '
    'with "category" as text and "pair" as a whole number where wanted'
)
"""Advice for a record that is not valid."""
_FOLDER = "put it into a folder with a questions.txt, and name the folder"
_NOT_TEXT = {
    rb"\x1f\x8b": ("gzip", "gunzip {}"),
    rb".{257}ustar|PK\x03\x04|7z\xbc\xaf|\x28\xb5\x2f\xfd|\xfd7zXZ|BZh\d": (
        "an archive or a spreadsheet",
        "unpack it, or export it as CSV or JSON",
    ),
    rb"version https://git-lfs": ("a Git LFS pointer", "git lfs pull"),
    rb"\x89PNG\r|\xff\xd8\xff|GIF8\da|RIFF.{4}WEBP|BM.{4}\0\0\0\0|II\*\0|MM\0\*": (
        "a picture",
        _FOLDER,
    ),
    rb".{4}ftyp(avif|heic|heix|mif1)": ("a picture", _FOLDER),
    rb".{4}ftyp|\x1aE\xdf\xa3|RIFF.{4}AVI": ("a video", _FOLDER),
    rb"%PDF-": ("a PDF file", "export its pages as PNG, with questions about them"),
    rb"\s*(?i:<(!doctype html|html))": (
        "an HTML page",
        "download the file itself, which may need a login",
    ),
    rb"SQLite format 3": ("a SQLite database", "export a table of it as CSV"),
    rb"\x80[\x02-\x05](}|]|\x95|c|X)": ("a pickle", "save it as JSON or CSV"),
}
"""Kinds of files that are not text, by their first bytes, and how to convert each to a data set."""
_UTF_16 = re.compile(rb"\A(\xff\xfe|\xfe\xff)|([^\0]\0){4}|(\0[^\0]){4}")
_BEGINNING = 512


def read_lines(path: Path, fix: str) -> Iterator[tuple[int, str]]:
    """Numbered lines of a UTF-8 file with their line ends; only ``\\n`` ends a line.

    Raises :class:`ConfigError` with one problem; ``fix`` is the advice if the file cannot be
    opened.
    """
    where = str(path)
    line = b""
    try:
        with path.open("rb") as file:
            _refuse_other_kinds(path, file.read(_BEGINNING))
            file.seek(0)
            for number, line in enumerate(file, 1):
                where = f"{path}:{number}"
                if (index := line.find(b"\0")) >= 0:
                    raise UnicodeDecodeError(
                        "utf-8", line, index, index + 1, "a NUL byte"
                    )
                # Editors on Windows put a byte order mark before the first line.
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if _UTF_16.search(line) else "LATIN1"
        what = f"is not UTF-8 ({error.reason}): {encoding}?"
        advice = f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > utf-8.txt"
        raise ConfigError.of(where, what, advice, subject="data") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError.of(
            str(path), f"cannot be read ({reason})", fix, subject="data"
        ) from None


def _refuse_other_kinds(path: Path, beginning: bytes) -> None:
    """Raise :class:`ConfigError` if the first bytes show a file that is not text, or is HTML."""
    for pattern, (kind, command) in _NOT_TEXT.items():
        if re.match(pattern, beginning, re.DOTALL):
            advice = command.format(shlex.quote(str(path)))
            what = f"is {kind}, not questions"
            raise ConfigError.of(str(path), what, advice, subject="data")


def parse(text: str) -> Any:
    """Parse strict JSON, with numbers as text and NaN as None; returns the error if invalid."""
    try:
        from_json(text)
        return json.loads(
            text,
            parse_int=Number,
            parse_float=Number,
            parse_constant=lambda name: None if name == "NaN" else Number(name),
        )
    except ValueError as error:
        return error


def read_records(
    path: Path, fix: str, columns: Collection[str]
) -> Iterator[tuple[str, Any]]:
    """Records of a file, each with its place; an invalid record is replaced by its problem.

    ``columns`` are the known columns of data sets, by which a table's header is recognised.
    """
    if is_arrow(path):
        yield from read_arrow(path)
        return
    numbered = read_lines(path, fix)
    beginning = next(
        (
            (number, line)
            for number, line in numbered
            if line.strip() and not line.startswith("#")
        ),
        (0, ""),
    )
    is_table = path.suffix.lower() in (".csv", ".tsv", ".tab")
    if header := read_header(path, beginning, numbered, columns, is_table=is_table):
        yield from _read_table(path, header, numbered)
        return
    lines = chain([beginning], numbered)
    line = beginning[1].strip()
    document = parse(line)
    if isinstance(document, ValueError) and re.match(r"\[|\{([^\]}]*[\[{,])?$", line):
        document = parse("".join(line for _, line in lines))
    elif not isinstance(document, list) and not (
        (
            isinstance(document, dict)
            and ({"questions", "annotations", "data"} & document.keys())
        )
        or _list_by_name(document)
    ):
        for number, line in lines:
            if line.strip():
                where = f"{path}:{number}"
                yield where, _explain(where, parse(line))
        return
    for number, record in enumerate(_list_records(path, document), 1):
        where = f"{path}: record {number}"
        yield where, _explain(where, record)


def _read_table(
    path: Path, header: Header, numbered: Iterator[tuple[int, str]]
) -> Iterator[tuple[str, Any]]:
    """Rows of a table, each with the place of its first line."""
    for number, row in read_rows(header, (line for _, line in numbered)):
        where = f"{path}:{number}"
        if isinstance(row, str):
            fix = f"quote cells that have {header.delimiter!r} or quotes in them"
            yield where, Problem(where, row, fix)
        else:
            yield where, row


def _explain(where: str, record: object) -> object:
    """The problem if ``record`` is not JSON; otherwise ``record`` unchanged."""
    if not isinstance(record, ValueError):
        return record
    reason = str(record).replace(" at line 1 column ", " at column ")
    return Problem(where, f"is not JSON ({reason})", FORM)


def _list_records(path: Path, document: object) -> Sequence[object]:
    """Records of a JSON document, which is a list, an object that contains a list, or a record."""
    if isinstance(document, dict):
        questions = document.get("questions")
        if isinstance(questions, list):
            return _join_annotations(path, document, questions)
        if "annotations" in document:
            fix = "name the file of their questions, with this one beside it"
            what = "has the answers to questions of another file"
            raise ConfigError.of(str(path), what, fix, subject="data")
        document = document.get("data") or _list_by_name(document) or [document]
    return document if isinstance(document, list) else [document]


def _list_by_name(document: object) -> list[dict[str, object]]:
    """Records of an object whose keys are their numbers, as in ScienceQA; else an empty list."""
    if not isinstance(document, dict):
        return []
    records = [
        {"id": name, **record}
        for name, record in document.items()
        if isinstance(record, dict) and "question" in record
    ]
    return records if len(records) == len(document) else []


def _join_annotations(
    path: Path, document: Mapping[str, object], questions: Sequence[object]
) -> Sequence[object]:
    """VQAv2's questions joined with their answers, which are in another file of the folder."""
    subtype = document.get("data_subtype")
    extra = {} if subtype is None else {"subtype": subtype}
    found = sorted(path.parent.glob("*annotations*.json"))
    files = [file for file in found if file.name[0] != "."]  # macOS writes ._ files
    answers = dict[str, dict[str, object]]()
    for file in [file for file in files if str(subtype) in file.name] or files:
        lines = read_lines(file, "make it readable")
        joined = parse("".join(line for _, line in lines))
        annotations = joined.get("annotations") if isinstance(joined, dict) else None
        for row in annotations if isinstance(annotations, list) else ():
            if isinstance(row, dict):
                answers[str(row.get("question_id"))] = row
    return [
        {**extra, **question, **answers.get(str(question.get("question_id")), {})}
        if isinstance(question, dict)
        else question
        for question in questions
    ]
