"""The questions of a JSONL file, checked before the first request: lines, images, kinds, pairs."""

from __future__ import annotations

import base64
import mimetypes
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.client import PreparedQuestion
from vllm_autoprune.evaluation.question_lines import Example, read_lines
from vllm_autoprune.evaluation.records import MME, Question

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
