"""Questions of one's own, read from files: lines, JSON, pictures, pairs.

Whatever a file holds, its problems are told with their lines, and nothing else is raised.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import re
import shlex
import stat
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import StringConstraints, ValidationError
from pydantic_core import from_json

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.journal import MME, PAIRS, Question
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
        problems.append(Problem(str(path), f"cannot be read ({_reason(error)})", fix))
    return []


# ---- pictures ----


class Picture(NamedTuple):
    """A picture that was decoded once, whole; ``image`` is what a model sees of it, in RGB.

    ``name`` is its path as written, or a digest where base64 was written; ``url`` is its content
    as a data URL, the same for the same content.
    """

    name: str
    url: str
    image: Image.Image


_NOT_DECODED = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
"""Formats that vLLM does not open, because they need other programs (vllm/multimodal/image.py)."""


def read_picture(where: str, folder: Path, text: str) -> Picture:
    """The picture at a path relative to ``folder``, or that a data URL or base64 holds.

    Raises :class:`ConfigError` with one problem, which is at ``where``.
    """

    def refusal(what: str, fix: str) -> ConfigError:
        return ConfigError("image", [Problem(where, what, fix)])

    name, path = text, folder / text
    encoded = text.partition(",")[2] if text[:5].lower() == "data:" else ""
    try:
        if not encoded:
            if not stat.S_ISREG(path.stat().st_mode):  # a pipe might never end
                raise IsADirectoryError(0, "not a file")
            content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if len(text) <= 40 or "." in text or isinstance(error, IsADirectoryError):
            fix = "give the path of a PNG or JPEG file"
            fix += "" if folder == Path() else f", relative to {folder}"
            raise refusal(f"cannot be read ({_reason(error)})", fix) from None
        encoded = text
    if encoded:
        encoded = "".join(encoded.split())
        try:
            content = base64.b64decode(encoded + "=" * (-len(encoded) % 4), b"-_", validate=True)
        except ValueError:
            fix = "give the path of a PNG or JPEG file, or its content in base64"
            raise refusal("is neither a file nor base64", fix) from None
        name = f"sha256:{hashlib.sha256(content).hexdigest()[:16]}"
    try:
        kind, image = _decode(content)
    except UnidentifiedImageError:
        if content.startswith(b"version https://git-lfs"):
            raise refusal("is a Git LFS pointer", "git lfs pull") from None
        what = "is not a picture that vLLM reads"
        raise refusal(what, "convert it to PNG or JPEG, or download it whole") from None
    except Exception as error:  # decoders raise anything for a broken file
        what = f"cannot be decoded ({_reason(error)})"
        raise refusal(what, "export it again, or make it smaller") from None
    data = base64.b64encode(content).decode()
    return Picture(name, f"data:{Image.MIME.get(kind, 'image/png')};base64,{data}", image)


def _decode(content: bytes) -> tuple[str, Image.Image]:
    """Format of a picture, and its first frame in RGB, as in vllm/multimodal/media/image.py."""
    Image.init()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of many pixels, and of odd metadata
        image: Image.Image = Image.open(
            io.BytesIO(content), formats=[name for name in Image.ID if name not in _NOT_DECODED]
        )
        kind = image.format or ""
        image.load()  # whole: `verify` looks at no pixel
        with contextlib.suppress(Exception):
            image = ImageOps.exif_transpose(image)
        if image.mode == "RGB":  # where vLLM leaves a transparent colour as it is
            return kind, image
        if not (image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info):
            return kind, image.convert("RGB")
        white = Image.new("RGB", image.size, "white")
        image = image.convert("RGBA")
        white.paste(image, mask=image.getchannel("A"))
        return kind, white


def _reason(error: Exception) -> str:
    """An exception's message in one short line."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(reason.split())[:160] or type(error).__name__


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
) -> tuple[list[Example], dict[str, str]]:
    """The examples of one JSONL file, and their images as data URLs by name.

    Problems are added to ``problems``; ``fix`` is for a file that cannot be read.
    """
    earlier, numbered = len(problems), list[tuple[int, Example]]()
    # Names of images by their text in the file, and by content.
    names, name_of_url = dict[str, str](), dict[str, str]()
    for number, line in read_lines(path, problems, fix, jsonl=True):
        where = f"{path}:{number}"
        try:
            example = Example.model_validate(from_json(line))
            text = example.image
            if text not in names:
                names[text] = ""  # so that a problem of an image is told once
                picture = read_picture(f"{where}: image {text[:80]!r}", path.parent, text)
                names[text] = name_of_url.setdefault(picture.url, picture.name)
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
    return [example for _, example in numbered], {name: url for url, name in name_of_url.items()}


class PreparedQuestion(NamedTuple):
    """One question with its prompt, reference answer and image."""

    record: Question
    text: str
    answer: str
    image: str
    """A ``data:`` URL; questions about one image share one object."""


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
        image = images[example.image]
        questions.append(PreparedQuestion(record, example.question, example.answer, image))
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
