"""Questions of a JSONL file, checked before the first request: lines, images, kinds, pairs."""

from __future__ import annotations

import base64
import hashlib
import json
import mimetypes
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from pydantic import Field, ValidationError

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.journal import MME, Question
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


@dataclass(frozen=True)
class PreparedQuestion:
    """One question with its prompt, reference answer and image."""

    record: Question
    text: str
    answer: str
    image: str
    """A ``data:`` URL; questions about one image share one object."""


def questions_digest(questions: Sequence[PreparedQuestion]) -> str:
    """First twelve digits of the SHA-256 over questions, answers and images."""
    digest = hashlib.sha256()
    for question in questions:
        digest.update(f"{question.text}\n{question.answer}\n{question.image}\n".encode())
    return digest.hexdigest()[:12]


_MAX_PROBLEMS = 20
_PAIR = ("no", "yes")

Numbered = Sequence[tuple[int, Example]]
"""Examples with the numbers of their lines."""


def read_questions(path: Path, limit: int | None = None) -> Sequence[PreparedQuestion]:
    """The first ``limit`` questions of a JSONL file, ordered by image; raises ConfigError.

    A line is as in a data folder of ``vllm-autoprune search``; image paths are relative to the
    file. The error lists every problem with its line. A pair that the limit cuts is left out.
    """
    problems: list[Problem] = []
    fix = "give the path of a JSONL file in UTF-8, one question a line"
    numbered = read_lines(path, problems, fix)
    images = _read_images(path, numbered, problems)
    problems += _check_kinds(path.name, numbered)
    problems += _check_repetitions(path.name, numbered)
    if not problems:
        problems += _check_pairs(path.name, numbered)
    if not numbered and not problems:
        problems.append(Problem(path.name, "contains no example", "give it at least one example"))
    if problems:
        problems.sort(key=_line_number)
        shown = problems[:_MAX_PROBLEMS]
        if more := len(problems) - len(shown):
            shown.append(Problem(path.name, f"{more} more problems", "fix those above first"))
        raise ConfigError(f"data {path}", shown)
    # Questions about one image follow each other, so that its features are computed once.
    order = {name: place for place, name in enumerate(images)}
    ordered = sorted(
        ((number, example) for number, (_, example) in enumerate(numbered)),
        key=lambda pair: order[pair[1].image],
    )[:limit]
    complete = Counter(_pair(example) for _, example in ordered)
    return [
        _prepare(number, example, images[example.image])
        for number, example in ordered
        if example.pair is None or complete[_pair(example)] == len(_PAIR)
    ]


def _read_images(path: Path, numbered: Numbered, problems: list[Problem]) -> dict[str, str]:
    """Images as ``data:`` URLs by their name; problems name the first line of each."""
    images: dict[str, str] = {}
    failed: set[str] = set()
    for line, example in numbered:
        name = example.image
        if name in images or name in failed:
            continue
        what, fix = _image_problem(path.parent, name)
        if what:
            failed.add(name)
            problems.append(Problem(f"{path.name}:{line}", f"image {name[:80]!r} {what}", fix))
        else:
            images[name] = _data_url(path.parent / name)
    return images


def _image_problem(folder: Path, name: str) -> tuple[str, str]:
    """What is wrong with an image file and how to fix it; empty where nothing is."""
    from PIL import Image, UnidentifiedImageError

    if name.partition(":")[0] in ("http", "https", "data"):
        return "is an address", "save the image as a file, and give its path"
    path = folder / name
    if path.is_dir():
        return "is a folder", "give the path of an image file in it"
    try:
        with Image.open(path) as image:
            image.verify()
    except FileNotFoundError:
        return "does not exist", f"correct the path; it is relative to {folder.resolve()}"
    except UnidentifiedImageError:
        return "is not an image that can be read", "save it as PNG or JPEG"
    except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for broken files
        reason = error.strerror if isinstance(error, OSError) else ""
        return f"cannot be read ({(reason or str(error))[:80]})", "save it again as PNG or JPEG"
    return "", ""


def _check_kinds(name: str, numbered: Numbered) -> Iterator[Problem]:
    """Kinds that differ only in case or spaces: each would be a kind of its own in the tables."""
    lines: dict[str, dict[str, list[int]]] = {}
    for line, example in numbered:
        spellings = lines.setdefault(" ".join(example.category.casefold().split()), {})
        spellings.setdefault(example.category, []).append(line)
    for spellings in lines.values():
        usual, *others = sorted(spellings, key=lambda one: len(spellings[one]), reverse=True)
        for other in others:
            where = f"{name}:{spellings[other][0]}"
            what = f'"category" {other!r} is written {usual!r} in line {spellings[usual][0]}'
            yield Problem(where, what, f"write {usual!r} in all of them, or names that differ")


def _check_repetitions(name: str, numbered: Numbered) -> Iterator[Problem]:
    """Questions that are asked twice: they count double, and two answers cannot both be right."""
    first: dict[tuple[str, str], tuple[int, str]] = {}
    for line, example in numbered:
        asked = example.image, " ".join(example.question.split())
        if asked not in first:
            first[asked] = line, example.answer
            continue
        earlier, answer = first[asked]
        what, fix = f"repeats the question of line {earlier}", "remove one of the two lines"
        if answer != example.answer:
            what += f" with another answer, {example.answer[:40]!r} instead of {answer[:40]!r}"
            fix = "keep the line with the right answer"
        yield Problem(f"{name}:{line}", what, fix)


def _check_pairs(name: str, numbered: Numbered) -> Iterator[Problem]:
    """Pairs that are not two questions about one image, of which one answer is yes and one no."""
    pairs: dict[tuple[str, int | None], list[tuple[int, Example]]] = {}
    for line, example in numbered:
        if example.pair is not None:
            pairs.setdefault(_pair(example), []).append((line, example))
    for (image, pair), members in pairs.items():
        where = f"{name}:{members[0][0]}"
        lines = ", ".join(str(line) for line, _ in members)
        if len(members) != len(_PAIR):
            what = f'"pair": {pair} about {image!r} has {len(members)} question(s): line {lines}'
            fix = "give a pair two questions about one image, or leave it out"
            yield Problem(where, what, fix)
        elif tuple(sorted(one.answer.strip().lower() for _, one in members)) != _PAIR:
            what = f'"pair": {pair} about {image!r} (lines {lines}) is not one "yes" and one "no"'
            yield Problem(where, what, 'give one question the answer "yes", the other "no"')


def _line_number(problem: Problem) -> int:
    line = problem.where.rpartition(":")[2]
    return int(line) if line.isdecimal() else 0


def _pair(example: Example) -> tuple[str, int | None]:
    return example.image, example.pair


def _data_url(path: Path) -> str:
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _prepare(number: int, example: Example, image: str) -> PreparedQuestion:
    paired = example.pair is not None
    record = Question(
        id=str(number),
        benchmark=MME if paired else example.category,
        image=example.image,
        category=example.category if paired else "",
        pair=f"{example.image}/{example.pair}" if paired else "",
    )
    return PreparedQuestion(record, example.question, example.answer, image)
