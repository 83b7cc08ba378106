"""Records of files: JSON lines, one JSON document, TSV and CSV.

Every problem is told with its line or record, and nothing else is raised.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from vllm_autoprune.errors import ConfigError

_NOT_TEXT = {
    rb"\x1f\x8b": ("gzip", "gunzip {}"),
    rb"PK\x03\x04|PAR1": (
        "an archive, a spreadsheet or Parquet",
        "export it as CSV or JSON",
    ),
    rb"version https://git-lfs": ("a Git LFS pointer", "git lfs pull"),
}
"""Other kinds of files by their beginning, and what makes text of them."""
_UTF_16 = re.compile(rb"\A(\xff\xfe|\xfe\xff)|([^\0]\0){4}|(\0[^\0]){4}")


def read_lines(path: Path, fix: str) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file with their numbers and ends; ``\\n`` alone ends one.

    Raises :class:`ConfigError` with one problem; ``fix`` is for a file that cannot be opened.
    """
    where = str(path)
    line = b""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}:{number}"
                for pattern, (kind, command) in (
                    _NOT_TEXT.items() if number == 1 else ()
                ):
                    if re.match(pattern, line):
                        advice = command.format(shlex.quote(str(path)))
                        what = f"is {kind}, not text"
                        raise ConfigError.of(str(path), what, advice, subject="data")
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


def parse(text: str) -> Any:
    """JSON, strictly, in which numbers are text as it is written, or the error."""
    try:
        from_json(text)
        return json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
    except ValueError as error:
        return error


def read_records(path: Path, fix: str) -> Iterator[tuple[str, Any]]:
    """The records of a file, each with its place; in place of one that is no JSON, its error."""
    numbered = read_lines(path, fix)
    beginning = next(
        ((number, line) for number, line in numbered if line.strip()), (0, "")
    )
    lines = chain([beginning], numbered)
    line = beginning[1].strip()
    if re.match(r'("?\w[^\t,]*[\t,])*"?(image|question)"?([\t,]|$)', line):
        yield from _read_table(path, (line for _, line in lines), line)
        return
    document = parse(line)
    if isinstance(document, ValueError) and re.match(r"\[|\{([^\]}]*[\[{,])?$", line):
        document = parse("".join(line for _, line in lines))
    elif not isinstance(document, list) and not (
        isinstance(document, dict)
        and {"questions", "annotations", "data"} & document.keys()
    ):
        for number, line in lines:
            if line.strip():
                yield f"{path}:{number}", parse(line)
        return
    for number, record in enumerate(_list_records(path, document), 1):
        yield f"{path}: record {number}", record


def _read_table(
    path: Path, lines: Iterator[str], head: str
) -> Iterator[tuple[str, Any]]:
    """The rows of TSV or CSV, without empty cells; a list in a cell is read as one."""
    csv.field_size_limit(1 << 31)
    rows = csv.DictReader(lines, delimiter="\t" if "\t" in head else ",")
    try:
        for row in rows:
            record: dict[str, Any] = {name: cell for name, cell in row.items() if cell}
            for name in {"image", "image_path", "answer"} & record.keys():
                if record[name].startswith("["):
                    errors = (ValueError, SyntaxError, MemoryError, RecursionError)
                    with contextlib.suppress(*errors):
                        record[name] = ast.literal_eval(record[name])
            yield f"{path}:{rows.line_num}", record
    except csv.Error as error:
        yield f"{path}:{rows.line_num}", ValueError(error)


def _list_records(path: Path, document: object) -> Sequence[object]:
    """The records of a JSON document: a list, an object with one, or one record."""
    if isinstance(document, dict):
        questions = document.get("questions")
        if isinstance(questions, list):
            return _join_annotations(path, document, questions)
        if "annotations" in document:
            fix = "name the file of their questions, with this one beside it"
            what = "has the answers to questions of another file"
            raise ConfigError.of(str(path), what, fix, subject="data")
        document = document.get("data", [document])
    return document if isinstance(document, list) else [document]


def _join_annotations(
    path: Path, document: Mapping[str, object], questions: Sequence[object]
) -> list[object]:
    """VQAv2's questions with the answers to them, which it has in a file beside theirs."""
    subtype = str(document.get("data_subtype", ""))
    files = sorted(path.parent.glob("*annotations*.json"))
    answers = dict[str, dict[str, object]]()
    for file in [file for file in files if subtype in file.name] or files:
        lines = read_lines(file, "make it readable")
        joined = parse("".join(line for _, line in lines))
        annotations = joined.get("annotations") if isinstance(joined, dict) else None
        for row in annotations if isinstance(annotations, list) else ():
            if isinstance(row, dict):
                answers[str(row.get("question_id"))] = row
    records = list[object]()
    for question in questions:
        if isinstance(question, dict):
            answer = answers.get(str(question.get("question_id")), {})
            question = {"subtype": subtype, **question, **answer}
        records.append(question)
    return records
