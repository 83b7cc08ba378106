"""Questions of one's own, read from files: lines, JSON, pairs.

Whatever a file holds, its problems are told with their lines, and nothing else is raised.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import StringConstraints, ValidationError
from pydantic_core import from_json

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.journal import MME, PAIRS, Question
from vllm_autoprune.evaluation.pictures import Picture, read_picture
from vllm_autoprune.record_file import FrozenModel

_Text = Annotated[str, StringConstraints(pattern=r"\S")]  # not blank

_MAX_PROBLEMS = 20


def refuse(subject: str, problems: Sequence[Problem]) -> None:
    """Raise :class:`ConfigError` with the first twenty of these problems, if there are any."""
    if (more := len(problems) - _MAX_PROBLEMS) > 0:
        count = Problem(subject, f"{more} more problems", "fix those above first")
        problems = [*problems[:_MAX_PROBLEMS], count]
    if problems:
        raise ConfigError(subject, problems)


# ---- lines and JSON ----

_EXPORT = "export it as JSON, one object a line"
_NOT_JSONL = {
    rb"\x1f\x8b": ("gzip", "gunzip {}"),
    rb"PK\x03\x04|PAR1": ("an archive, a spreadsheet or Parquet", _EXPORT),
    rb"version https://git-lfs": ("a Git LFS pointer", "git lfs pull"),
    rb"\[\s*([{\]]|$)": ("one JSON array", "jq -c '.[]' {} > questions.jsonl"),
    rb"[\[{]([^\]}]*[\[{,])?$": ("JSON over several lines", "jq -c . {} > questions.jsonl"),
    rb"[\w ]+([,\t][\w ]+)+$": ("CSV or TSV", _EXPORT),
}
"""Other kinds of files by the beginning of their first line, and what makes JSON lines of them."""
_UTF_16 = re.compile(rb"\A(\xff\xfe|\xfe\xff)|([^\0]\0){4}|(\0[^\0]){4}")


def read_lines(
    path: Path, problems: list[Problem], fix: str, *, jsonl: bool = False
) -> list[tuple[int, str]]:
    """The lines of a UTF-8 file that are not blank, with their numbers; ``\\n`` alone ends one.

    Problems are added to ``problems``, for ``jsonl`` also that it is a file of another kind;
    ``fix`` is for a file that cannot be opened.
    """
    try:
        content = path.read_bytes()
        # Editors on Windows put a byte order mark before the first line.
        line = content.removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n\t ").split(b"\n", 1)[0].rstrip()
        for pattern, (kind, command) in _NOT_JSONL.items() if jsonl else ():
            if re.match(pattern, line):
                advice = command.format(shlex.quote(str(path)))
                problems.append(Problem(str(path), f"is {kind}, not one object a line", advice))
                return []
        if (place := content.find(b"\0")) >= 0:
            raise UnicodeDecodeError("utf-8", content, place, place + 1, "a NUL byte")
        lines = enumerate(content.decode("utf-8-sig").split("\n"), 1)
        return [(number, text) for number, text in lines if text.strip()]
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        encoding = "UTF-16" if _UTF_16.search(content) else "LATIN1"
        what = f"is not UTF-8 ({error.reason}): {encoding}?"
        advice = f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > utf-8.jsonl"
        problems.append(Problem(f"{path}:{number}", what, advice))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        problems.append(Problem(str(path), f"cannot be read ({reason})", fix))
    return []


# ---- questions ----


class Example(FrozenModel):
    """One question about one image.

    A file has the image's path, relative to itself, or its content in base64; once read, it has
    one name for each content.
    """

    image: _Text
    question: _Text
    answer: _Text
    category: _Text = "all"
    pair: int | None = None


_FORM = (
    'write one object a line: {"image": "a.png", "question": "...", "answer": "..."}, with '
    '"category" as text and "pair" as a whole number where wanted'
)
_MEANINGS = {
    "missing": "is missing",
    "extra_forbidden": "is not a known field",
    "string_type": "is not text",
    "string_pattern_mismatch": "is blank",
    "model_type": "is not an object",
}


def read_examples(
    path: Path, problems: list[Problem], fix: str
) -> tuple[list[Example], dict[str, Picture]]:
    """The examples of one JSONL file, and their pictures by name.

    Problems are added to ``problems``; ``fix`` is for a file that cannot be read.
    """
    earlier, numbered = len(problems), list[tuple[int, Example]]()
    # Names of images by their text in the file, and pictures by content.
    names, pictures = dict[str, str](), dict[str, Picture]()
    for number, line in read_lines(path, problems, fix, jsonl=True):
        where = f"{path}:{number}"
        try:
            example = Example.model_validate(from_json(line))
            text = example.image
            if text not in names:
                names[text] = ""  # so that a problem of an image is told once
                picture = read_picture(f"{where}: image {text[:80]!r}", path.parent, text)
                names[text] = pictures.setdefault(picture.digest, picture).name
            numbered.append((number, example.model_copy(update={"image": names[text]})))
        except ConfigError as error:
            problems += error.problems
        except ValidationError as error:
            what = "; ".join(
                f"{'.'.join(map(str, detail['loc']))[:40]!r} ".removeprefix("'' ")
                + _MEANINGS.get(detail["type"], detail["msg"])
                for detail in error.errors(include_url=False)
            )
            problems.append(Problem(where, what, _FORM))
        except ValueError as error:
            what = f"is not JSON ({error})".replace(" at line 1 column ", " at column ")
            problems.append(Problem(where, what, _FORM))
    if not numbered and len(problems) == earlier:
        problems.append(Problem(str(path), "contains no example", "give it at least one example"))
    if len(problems) == earlier:
        problems += find_contradictions(path, numbered)
    return [example for _, example in numbered], {each.name: each for each in pictures.values()}


_Turns = Sequence[Mapping[str, object]]


class PreparedQuestion(NamedTuple):
    """A question as it is sent: chat messages, and the answers that are accepted."""

    record: Question
    answers: tuple[str, ...]
    """Empty where the file has none."""
    turns: _Turns
    """Messages of OpenAI's form, with a :class:`Picture` for the part of each image."""

    def messages(self) -> list[dict[str, object]]:
        """The messages with data URLs, which are read from the pictures' files now.

        Raises :class:`EvaluationError` for a file that has changed.
        """
        return render(self.turns, Picture.part)

    @property
    def digest(self) -> str:
        """SHA-256 of the messages and the contents of their pictures, without the answers."""
        text = json.dumps(render(self.turns, lambda picture: picture.digest))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def pictures(self) -> list[Picture]:
        """The pictures of all turns."""
        pictures: list[Picture] = []
        render(self.turns, pictures.append)
        return pictures

    @property
    def text(self) -> str:
        """The text of the last turn."""
        content = render(self.turns, lambda picture: {})[-1].get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        return "\n".join(str(part["text"]) for part in parts if part.get("text"))


def render(turns: _Turns, show: Callable[[Picture], object]) -> list[dict[str, object]]:
    """Messages with what ``show`` makes of their pictures."""
    messages = []
    for turn in turns:
        message = dict(turn)
        if isinstance(parts := message.get("content"), list):
            parts = [show(part) if isinstance(part, Picture) else part for part in parts]
            message["content"] = parts
        messages.append(message)
    return messages


def ask(question: str, *pictures: Picture) -> _Turns:
    """The turn of a question about pictures."""
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": question}]}]


def read_questions(path: Path, limit: int | None = None) -> Sequence[PreparedQuestion]:
    """The first ``limit`` questions of a JSONL file, ordered by image; raises ConfigError.

    A line is as in a data folder of ``vllm-autoprune search``. The error lists every problem with
    its line. A pair that the limit cuts is left out.
    """
    problems: list[Problem] = []
    fix = "give the path of a JSONL file in UTF-8, one question a line"
    unordered, images = read_examples(path, problems, fix)
    refuse("data", problems)
    # Questions about one image follow each other, so that its features are computed once.
    order = {name: place for place, name in enumerate(images)}
    examples = sorted(enumerate(unordered), key=lambda pair: order[pair[1].image])[:limit]
    sizes = Counter((example.image, example.pair) for _, example in examples)
    questions = []
    for number, example in examples:
        paired = example.pair is not None
        if paired and sizes[example.image, example.pair] < 2:
            continue
        # Names of what is scored in pairs.
        taken = example.category in (MME, PAIRS)
        category = f"{example.category} without pairs" if taken else example.category
        record = Question(
            id=str(number),
            benchmark=PAIRS if paired else category,
            image=example.image,
            category=example.category if paired else "",
            pair=f"{example.image}/{example.pair}" if paired else "",
        )
        turns = ask(example.question, images[example.image])
        questions.append(PreparedQuestion(record, (example.answer,), turns))
    return questions


def find_contradictions(path: Path, numbered: Sequence[tuple[int, Example]]) -> Iterator[Problem]:
    """Questions about one image with two answers; else pairs that are not one yes and one no."""
    answers: dict[tuple[str, str], tuple[int, str]] = {}
    pairs: dict[tuple[str, int], list[tuple[int, str]]] = {}
    contradicts = False
    for line, example in numbered:
        answer = example.answer.strip().lower()
        asked = (example.image, example.question.strip())
        earlier, expected = answers.setdefault(asked, (line, answer))
        if answer != expected:
            contradicts = True
            what = f"has another answer than line {earlier} to the same question about one image"
            yield Problem(f"{path}:{line}", what, "keep one of them: only one can be exact")
        if example.pair is not None:
            pairs.setdefault((example.image, example.pair), []).append((line, answer))
    for (image, pair), members in () if contradicts else pairs.items():
        if sorted(answer for _, answer in members) != ["no", "yes"]:
            lines = ", ".join(str(line) for line, _ in members)
            about = f'"pair": {str(pair)[:40]} about {image!r}'
            what = f'{about} is not one "yes" and one "no" (lines {lines})'
            fix = "give a pair two questions about one image with these answers, or leave it out"
            yield Problem(f"{path}:{members[0][0]}", what, fix)
