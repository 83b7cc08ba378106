"""Questions of a JSONL file, checked before the first request: lines, images, kinds, pairs."""

from __future__ import annotations

import base64
import hashlib
import mimetypes
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


_FORM = (
    'write one object a line: {"image": "a.png", "question": "...", "answer": "..."}, with '
    '"category" as text and "pair" as a whole number where wanted'
)


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
    if re.match(r"\s*\[\s*[{\]]", text):  # else each line would be a problem
        fix = f"write each object on one line: jq -c '.[]' {path.name} > questions.jsonl"
        problems.append(Problem(path.name, "is one JSON array", fix))
        return []
    examples = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            examples.append((number, Example.model_validate_json(line)))
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                field = ".".join(map(str, detail["loc"]))
                what = f'"{field[:40]}": {detail["msg"]}' if field else detail["msg"]
                problems.append(Problem(f"{path.name}:{number}", what, _FORM))
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


def read_questions(path: Path, limit: int | None = None) -> Sequence[PreparedQuestion]:
    """The first ``limit`` questions of a JSONL file, ordered by image; raises ConfigError.

    A line is as in a data folder of ``vllm-autoprune search``; image paths are relative to the
    file. The error lists every problem with its line. A pair that the limit cuts is left out.
    """
    from PIL import Image

    problems: list[Problem] = []
    fix = "give the path of a JSONL file in UTF-8, one question a line"
    numbered = read_lines(path, problems, fix)
    lines = {example.image: line for line, example in reversed(numbered)}
    images = {}
    for image in dict.fromkeys(example.image for _, example in numbered):
        try:
            with Image.open(path.parent / image) as content:
                content.verify()
        except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for broken files
            reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
            what = f"image {image[:80]!r} cannot be read ({reason[:160]})"
            fix = f"give the path of a PNG or JPEG file; it is relative to {path.parent.resolve()}"
            problems.append(Problem(f"{path.name}:{lines[image]}", what, fix))
            continue
        kind = mimetypes.guess_type(image)[0] or "image/png"
        data = base64.b64encode((path.parent / image).read_bytes()).decode()
        images[image] = f"data:{kind};base64,{data}"
    if not numbered and not problems:
        problems.append(Problem(path.name, "contains no example", "give it at least one example"))
    problems = problems or list(_check_pairs(path.name, numbered))
    if (more := len(problems) - _MAX_PROBLEMS) > 0:
        fix = "fix those above first"
        problems[_MAX_PROBLEMS:] = [Problem(path.name, f"{more} more problems", fix)]
    if problems:
        raise ConfigError(f"data {path}", problems)
    # Questions about one image follow each other, so that its features are computed once.
    order = {name: place for place, name in enumerate(images)}
    examples = sorted(
        enumerate(example for _, example in numbered), key=lambda pair: order[pair[1].image]
    )[:limit]
    sizes = Counter((example.image, example.pair) for _, example in examples)
    questions = []
    for number, example in examples:
        paired = example.pair is not None
        if paired and sizes[example.image, example.pair] < 2:
            continue
        record = Question(
            id=str(number),
            benchmark=MME if paired else example.category,
            image=example.image,
            category=example.category if paired else "",
            pair=f"{example.image}/{example.pair}" if paired else "",
        )
        image = images[example.image]
        questions.append(PreparedQuestion(record, example.question, example.answer, image))
    return questions


def _check_pairs(name: str, numbered: Sequence[tuple[int, Example]]) -> Iterator[Problem]:
    """Pairs that are not two questions about one image, of which one answer is yes and one no."""
    pairs: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for line, example in numbered:
        if example.pair is not None:
            answer = example.answer.strip().lower()
            pairs.setdefault((example.image, example.pair), []).append((line, answer))
    for (image, pair), members in pairs.items():
        if sorted(answer for _, answer in members) != ["no", "yes"]:
            lines = ", ".join(str(line) for line, _ in members)
            what = f'"pair": {pair} about {image!r} is not one "yes" and one "no" (lines {lines})'
            fix = "give a pair two questions about one image with these answers, or leave it out"
            yield Problem(f"{name}:{members[0][0]}", what, fix)
