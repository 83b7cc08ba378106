"""Questions of a JSONL file, one a line; what is wrong with a line, and how to fix it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from pydantic import Field, ValidationError

from vllm_autoprune.errors import Problem
from vllm_autoprune.record_file import FrozenModel


class Example(FrozenModel):
    """One question about one image; ``image`` is a path relative to the data folder."""

    image: str = Field(min_length=1)
    question: str = Field(min_length=1)
    answer: str = Field(min_length=1)
    category: str = Field(default="all", min_length=1)
    pair: int | None = None


_OTHER_NAMES = {
    "answers": "answer",
    "file": "image",
    "gold": "answer",
    "group": "category",
    "image_path": "image",
    "img": "image",
    "kind": "category",
    "label": "answer",
    "path": "image",
    "prompt": "question",
    "reference": "answer",
    "target": "answer",
    "task": "category",
    "text": "question",
    "type": "category",
}
"""What other data sets call these fields."""

_ADVICE = {
    "image": "give the path of the image as text, relative to the folder of this file",
    "question": "give the question as text",
    "answer": "give the right answer as text, in quotes also where it is a number",
    "category": "give the kind of question as text, or leave it out",
    "pair": "give a whole number that the two questions of a yes/no pair share, or leave it out",
}
_ONE_OBJECT = 'write one object a line: {"image": "a.png", "question": "...", "answer": "..."}'
_JSON_TYPES = {dict: "an object", list: "a list", str: "text", bool: "true or false",
               int: "a number", float: "a number", type(None): "null"}  # fmt: skip


def describe_document(text: str, name: str) -> Problem | None:
    """The problem of a file that is one JSON array of objects, or one object over several lines.

    Each of its lines would be a problem otherwise.
    """
    start = text.lstrip()
    if start[:1] == "[" and start[1:].lstrip()[:1] in ("{", "]"):
        fix = f"write each of its objects on one line: jq -c '.[]' {name} > questions.jsonl"
        return Problem(name, "begins as one JSON array, not as one object a line", fix)
    if start[:1] == "{" and not start[1:].split("\n", 1)[0].strip():
        fix = f"write each object on one line: jq -c . {name} > questions.jsonl"
        return Problem(name, "has its objects over several lines", fix)
    return None


def describe_problems(
    line: str, where: str, error: ValidationError, fields: Sequence[str]
) -> Iterator[Problem]:
    """Every problem of a line that is no example; ``fields`` are those that it may have."""
    details = error.errors(include_url=False)
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as wrong:
        said = str(wrong).replace("line 1 column", "column")
        fix = _ONE_OBJECT
        if line.rstrip().endswith("},"):
            fix = "remove the comma at the end of the line"
        yield Problem(where, f"is not JSON: {said}", fix)
        return
    if not isinstance(content, dict):
        yield Problem(where, f"is {_JSON_TYPES[type(content)]}, not an object", _ONE_OBJECT)
        return
    for detail in details:
        field = ".".join(map(str, detail["loc"])) or "line"
        value = content.get(field)
        if detail["type"] == "json_invalid":
            yield Problem(where, f"is not JSON: {detail['msg']}", _ONE_OBJECT)
        elif detail["type"] == "extra_forbidden":
            yield _unknown_field(where, field, content, fields)
        elif detail["type"] == "missing":
            meant = [name for name in content if _meant(name, fields) == field]
            if not meant:  # else the field of another name is reported
                yield Problem(where, f'has no "{field}"', _ADVICE.get(field, f'add "{field}"'))
        else:
            what = f"is {_JSON_TYPES[type(value)]}" if value not in ("", None) else "is empty"
            if isinstance(value, str) and value:
                what = detail["msg"]
            yield Problem(where, f'"{field}" {what}', _ADVICE.get(field, "correct it"))


def _unknown_field(
    where: str, field: str, content: dict[str, object], fields: Sequence[str]
) -> Problem:
    meant = _meant(field, fields)
    known = ", ".join(fields)
    fix = f"remove it; the fields are {known}"
    if meant and meant not in content:
        fix = f'rename it to "{meant}"; the fields are {known}'
    return Problem(where, f'has an unknown field "{field[:40]}"', fix)


def _meant(name: str, fields: Sequence[str]) -> str:
    """The field that another name probably means; empty where none is near."""
    if name in fields:
        return ""
    lowered = name.lower()
    if lowered in _OTHER_NAMES:
        return _OTHER_NAMES[lowered]
    return next(iter(get_close_matches(lowered, fields, 1)), "")


def read_lines(path: Path, problems: list[Problem], fix: str) -> list[tuple[int, Example]]:
    """The examples of one JSONL file with their line numbers; empty lines are left out.

    Problems are added to ``problems``; ``fix`` is for a file that cannot be read.
    """
    try:
        # Editors on Windows put a byte order mark before the first line.
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        problems.append(Problem(path.name or str(path), f"cannot be read ({reason})", fix))
        return []
    if problem := describe_document(text, path.name):
        problems.append(problem)
        return []
    examples = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            examples.append((number, Example.model_validate_json(line)))
        except ValidationError as error:
            where = f"{path.name}:{number}"
            problems += describe_problems(line, where, error, tuple(Example.model_fields))
    return examples
