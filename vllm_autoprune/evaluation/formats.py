"""Readers of the files and folders that people have; a format is recognised by its content.

A file is JSON lines, one JSON document, TSV or CSV; a folder has pictures, and questions in text
files. Every problem is told with its line or record, and nothing else is raised.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Any, NamedTuple

from PIL import Image
from pydantic import (
    AliasChoices,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationError,
)
from pydantic_core import from_json

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.answers import Rule, score_text
from vllm_autoprune.evaluation.pictures import (
    VIDEOS,
    Picture,
    PictureSource,
    find_picture,
)
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.stream import one_line

_Turns = Sequence[Mapping[str, object]]
"""Messages of OpenAI's form, with a picture or its source for the part of each image."""


@dataclass(frozen=True)
class AskedQuestion:
    """A question as it is sent, and the answers that are accepted: none where the data has none."""

    where: str
    turns: _Turns
    answers: tuple[str, ...]
    rule: Rule = "text"
    category: str = "all"
    pair: int | None = None

    def messages(self, frames: int = 0) -> list[dict[str, object]]:
        """The messages with data URLs, which are read from the pictures' files now.

        ``frames``: how many of a video. Raises :class:`EvaluationError` for a file that has
        changed.
        """
        return render(self.turns, lambda picture: picture.part(frames))

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

    @property
    def is_exact(self) -> bool:
        """Whether only one text is right, so that a prefill which has it can score it."""
        return self.rule == "text" and len(self.answers) == 1

    def score_text(self, text: str) -> float:
        """Accuracy of a text by the data's own rule, 0 to 1."""
        return score_text(self.rule, self.answers, text)


def render(turns: _Turns, show: Callable[[Any], object]) -> list[dict[str, object]]:
    """Messages with what ``show`` makes of their pictures."""
    messages = []
    for turn in turns:
        message = dict(turn)
        if isinstance(parts := message.get("content"), list):
            kinds = (Picture, PictureSource)
            parts = [show(part) if isinstance(part, kinds) else part for part in parts]
            message["content"] = parts
        messages.append(message)
    return messages


def ask(question: str, *pictures: Picture | PictureSource) -> _Turns:
    """The turn of a question about pictures."""
    return [
        {"role": "user", "content": [*pictures, {"type": "text", "text": question}]}
    ]


# ---- lines, JSON, tables ----

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


def _read_lines(path: Path, fix: str) -> Iterator[tuple[int, str]]:
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


def _parse(text: str) -> Any:
    """JSON, strictly, in which numbers are text as it is written, or the error."""
    try:
        from_json(text)
        return json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
    except ValueError as error:
        return error


def _read_records(path: Path, fix: str) -> Iterator[tuple[str, Any]]:
    """The records of a file, each with its place; in place of one that is no JSON, its error."""
    numbered = _read_lines(path, fix)
    beginning = next(
        ((number, line) for number, line in numbered if line.strip()), (0, "")
    )
    lines = chain([beginning], numbered)
    line = beginning[1].strip()
    if re.match(r'("?\w[^\t,]*[\t,])*"?(image|question)"?([\t,]|$)', line):
        yield from _read_table(path, (line for _, line in lines), line)
        return
    document = _parse(line)
    if isinstance(document, ValueError) and re.match(r"\[|\{([^\]}]*[\[{,])?$", line):
        document = _parse("".join(line for _, line in lines))
    elif not isinstance(document, list) and not (
        isinstance(document, dict)
        and {"questions", "annotations", "data"} & document.keys()
    ):
        for number, line in lines:
            if line.strip():
                yield f"{path}:{number}", _parse(line)
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
        lines = _read_lines(file, "make it readable")
        joined = _parse("".join(line for _, line in lines))
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


# ---- questions ----

Text = Annotated[str, StringConstraints(pattern=r"\S")]  # not blank


def _list_texts(value: object) -> list[object]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [item.get("answer") if isinstance(item, dict) else item for item in values]


_Texts = Annotated[tuple[Text, ...], BeforeValidator(_list_texts)]


class _Line(FrozenModel):
    """One question of a file in this project's form."""

    image: _Texts = Field(
        validation_alias=AliasChoices("image", "images", "video", "videos"),
        min_length=1,
    )
    question: Text
    answer: _Texts = Field(
        default=(), validation_alias=AliasChoices("answer", "answers")
    )
    category: Text = "all"
    pair: int | None = None


_FORM = (
    'write one object a line: {"image": "a.png", "question": "...", "answer": "..."}, or "video", '
    'with "category" as text and "pair" as a whole number where wanted'
)
_CHAT = "give chat messages of OpenAI's form, with text and image_url"
_MEANINGS = {
    "missing": "is missing",
    "extra_forbidden": "is not a known field",
    "string_type": "is not text",
    "string_pattern_mismatch": "is blank",
    "model_type": "is not an object",
    "too_short": "is empty",
}
_SHORT = "\nAnswer the question using a single word or phrase."
"""Asked by lmms-eval and VLMEvalKit behind questions with ten answers."""


# ---- records of known data sets ----


class _Record(NamedTuple):
    """A record of a file, and the folders in which its pictures are searched."""

    where: str
    fields: Mapping[str, Any]
    folders: Sequence[Path]


class _Recognised(NamedTuple):
    """What a record of a data set says, as it is written there; None for what it does not have."""

    image: object
    question: object
    answer: object
    category: object
    accepted: tuple[str, ...] = ()
    """The answer as an option's letter and as its text, where there are options."""


_Recogniser = Callable[[_Record], _Recognised | None]
_DATA_SETS: list[_Recogniser] = []
"""Readers of data sets in the order in which they are tried; each gives None for another's."""


def _data_set(reader: _Recogniser) -> _Recogniser:
    _DATA_SETS.append(reader)
    return reader


@_data_set
def _read_lmms_sample(record: _Record) -> _Recognised | None:
    """A sample that lmms-eval logged."""
    fields = record.fields
    if not {"doc_id", "target"} <= fields.keys():
        return None
    arguments = fields.get("arguments")
    prompts = [fields.get("input")]
    if isinstance(arguments, list):
        prompts += arguments
    text = next((prompt for prompt in prompts if isinstance(prompt, str)), None)
    image = fields.get("input_media")
    if not image:
        what = (
            "has no picture: lmms-eval keeps only those that have a path or an address"
        )
        fix = "give the data of the task itself, such as VLMEvalKit's TSV of it"
        raise ConfigError.of(record.where, what, fix, subject="data")
    return _Recognised(image, text, fields["target"], fields.get("category"))


@_data_set
def _read_pope(record: _Record) -> _Recognised | None:
    """A question of POPE, or one of LLaVA's without an answer."""
    fields = record.fields
    if "text" not in fields or "question" in fields:
        return None
    image = fields.get("image", fields.get("video"))
    return _Recognised(
        image, fields["text"], fields.get("label"), fields.get("category")
    )


@_data_set
def _read_vlmevalkit(record: _Record) -> _Recognised | None:
    """A row of VLMEvalKit; options are columns named by letters."""
    fields = record.fields
    if "index" not in fields:
        return None
    text = fields.get("question", "")
    answer = fields.get("answer")
    image = fields.get("image", fields.get("image_path", fields.get("video")))
    category = fields.get("category")
    options = {name: fields[name] for name in ascii_uppercase if name in fields}
    if not options:
        if isinstance(answer, list):
            text = f"{text}{_SHORT}"
        return _Recognised(image, text, answer, category)
    hint = f"Hint: {fields['hint']}\n" if "hint" in fields else ""
    choices = "".join(f"{name}. {option}\n" for name, option in options.items())
    text = f"{hint}Question: {text}\nOptions:\n{choices}"
    text += "Please select the correct answer from the options above. \n"
    accepted = (answer, options[answer]) if answer in [*options] else ()
    return _Recognised(image, text, answer, category, accepted)


@_data_set
def _read_vqa(record: _Record) -> _Recognised | None:
    """A question of VQAv2, OK-VQA, TextVQA or VizWiz; ten people answered it."""
    fields = record.fields
    if not {"image_id", "answer_type"} & fields.keys():
        return None
    number = str(fields.get("image_id", ""))
    subtype = fields.get("subtype")
    coco = f"COCO_{subtype or ''}_{number:0>12}"
    names = [
        coco,
        f"{subtype}/{coco}",
        f"train_images/{number}",
        f"{number:0>12}",
        number,
    ]
    if "image" in fields:
        names = [fields["image"]]
    files = [f"{name}.jpg" for name in names]
    existing = (
        file
        for file in files
        if any((folder / file).exists() for folder in record.folders)
    )
    image = next(existing, files[0] if subtype else names[-1])
    text = f"{fields.get('question', '')}{_SHORT}"
    return _Recognised(image, text, fields.get("answers"), fields.get("answer_type"))


class QuestionReader:
    """Reader of one file or folder; pictures are searched in ``folders``."""

    def __init__(self, path: Path, images: Path | None, fix: str) -> None:
        self.path = path
        self._fix = fix
        self._folders = (
            [path if path.is_dir() else path.parent] if images is None else [images]
        )
        self._sources: dict[str, PictureSource | None] = {}
        self._rows: dict[str, list[PictureSource]] = {}
        """Pictures of VLMEvalKit's rows by index, which later rows may give in their place."""
        self.without_picture = 0
        """Chat requests that are left out."""

    def read(self, problems: list[Problem]) -> Iterator[AskedQuestion]:
        """The questions, with the sources of their pictures; problems are added to ``problems``."""
        try:
            if self.path.is_dir():
                yield from self._read_folder(problems)
                return
            for where, record in _read_records(self.path, self._fix):
                try:
                    question = self._read_record(where, record)
                except ConfigError as error:
                    problems += error.problems
                except ValidationError as error:
                    meanings = dict[str, str]()
                    for detail in error.errors(include_url=False):
                        name = "".join(
                            f"{str(field)[:40]!r} " for field in detail["loc"][:1]
                        )
                        meanings.setdefault(
                            name, _MEANINGS.get(detail["type"], detail["msg"])
                        )
                    what = "; ".join(
                        f"{name}{meaning}" for name, meaning in meanings.items()
                    )
                    problems.append(Problem(where, what, _FORM))
                else:
                    if question is not None:
                        yield question
                    self.without_picture += question is None
        except ConfigError as error:
            problems += error.problems
        except OSError as error:  # of the folder
            what = f"cannot be read ({error.strerror})"
            problems.append(Problem(str(error.filename), what, self._fix))

    def _find(self, where: str, text: str) -> PictureSource:
        """The source of a picture; a problem with it is raised once, then without words."""
        key = text if len(text) < 4096 else hashlib.sha256(text.encode()).hexdigest()
        if key not in self._sources:
            self._sources[key] = None
            image = f"{where}: image {text[:80]!r}"
            self._sources[key] = find_picture(image, text, *self._folders)
        if (source := self._sources[key]) is None:
            raise ConfigError("image", [])
        return source

    def _read_record(self, where: str, record: Any) -> AskedQuestion | None:
        """The question of a record; None for a chat request without a picture."""
        if isinstance(record, ValueError):
            what = f"is not JSON ({record})".replace(
                " at line 1 column ", " at column "
            )
            raise ConfigError.of(where, what, _FORM, subject="data")
        if isinstance(record, dict):
            body = record
            for name in ("request", "body"):  # a gateway may log them as text
                inner = body.get(name)
                inner = _parse(inner) if isinstance(inner, str) else inner
                body = inner if isinstance(inner, dict) else body
            if isinstance(messages := body.get("messages"), list):
                return self._read_chat(where, messages)
            if isinstance(turns := record.get("conversations"), list):
                return self._read_chat(where, turns, record.get("image"))
        fields, rule, answers = self._recognise(where, record)
        line = _Line.model_validate(fields)
        if not (sources := self._rows.get(line.image[0])):
            sources = [self._find(where, text) for text in line.image]
        if isinstance(record, dict) and "index" in record:
            self._rows[str(record["index"])] = sources
        answers = answers or line.answer
        rule = "vqa" if len(answers) == 10 else rule
        return AskedQuestion(
            where, ask(line.question, *sources), answers, rule, line.category, line.pair
        )

    def _recognise(self, where: str, record: Any) -> tuple[Any, Rule, tuple[str, ...]]:
        """A record of a known data set as fields of a line, its rule, and answers with an option.

        One that is not known is a line in this project's form.
        """
        fields = record if isinstance(record, dict) else {}
        attempts = (read(_Record(where, fields, self._folders)) for read in _DATA_SETS)
        recognised = next(filter(None, attempts), None)
        if recognised is None:
            return record, "text", ()
        line = recognised._asdict()
        accepted = line.pop("accepted")
        line = {name: value for name, value in line.items() if value is not None}
        rule: Rule = "text"
        if accepted:
            rule = "choice"
        elif str(recognised.answer).strip().lower() in ("yes", "no"):
            rule = "yes_no"
        return line, rule, accepted

    def _read_chat(
        self, where: str, messages: Sequence[object], images: object = None
    ) -> AskedQuestion | None:
        """The question of a chat request, or of a conversation of LLaVA's form with its images.

        A last turn of the assistant is its answer.
        """

        turns = list[dict[str, Any]]()
        sources = 0
        names = iter(_list_texts(images))
        for message in messages:
            match message:
                case {"from": str(role), "value": str(text)}:
                    pieces = [
                        piece for piece in re.split("(<image>)", text) if piece.strip()
                    ]
                    message = {
                        "role": {"human": "user", "gpt": "assistant"}.get(role, role),
                        "content": [
                            {"image_url": next(names, piece)}
                            if piece == "<image>"
                            else piece.strip()
                            for piece in pieces
                        ],
                    }
            if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
                what = "has a message without a role"
                raise ConfigError.of(where, what, _CHAT, subject="data")
            content = message.get("content")
            parts = list[object]()
            for part in content if isinstance(content, list) else ():
                match part:
                    case str(text) | {"type": "text" | "input_text", "text": str(text)}:
                        parts.append({"type": "text", "text": text})
                    case {"image_url": {"url": str(url)} | str(url)} | {
                        "video_url": {"url": str(url)} | str(url)
                    }:
                        parts.append(self._find(where, url))
                        sources += 1
                    case _:
                        kind = part.get("type") if isinstance(part, dict) else part
                        what = f"has a part of type {one_line(kind, 40)!r}"
                        raise ConfigError.of(where, what, _CHAT, subject="data")
            turns.append({**message, "content": parts or content})
        answer = (
            turns.pop()["content"]
            if turns and turns[-1]["role"] == "assistant"
            else None
        )
        if not (sources and turns):
            return None
        if isinstance(answer, list):
            answer = "".join(
                part.get("text", "") for part in answer if isinstance(part, dict)
            )
        return AskedQuestion(
            where, turns, (answer,) if answer and str(answer).strip() else ()
        )

    def _read_folder(self, problems: list[Problem]) -> Iterator[AskedQuestion]:
        """Questions of text files: of a picture's name about it, else ``questions.txt`` about all.

        A line is a question, or a question, a tab and its answer. Sub-folders, as MME has them, are
        categories; a yes and a no about one picture are a pair there.
        """
        pairs = count()
        without_text = 0
        with_text = 0
        subfolders = sorted(path for path in self.path.iterdir() if path.is_dir())
        for folder in (self.path, *subfolders):
            category = "all" if folder == self.path else one_line(folder.name, 80)
            texts, pictures = _list_section(folder, problems)
            for picture in pictures:
                shared = folder / _SHARED
                if not shared.exists():
                    shared = self.path / _SHARED
                text = texts.get(picture.stem, shared)
                if not text.exists():
                    without_text += 1
                    continue
                with_text += 1
                questions = list(self._read_text(text, picture, category))
                rules = [question.rule for question in questions]
                pair = None
                if picture.stem in texts and rules == ["yes_no", "yes_no"]:
                    pair = next(pairs)
                yield from (replace(question, pair=pair) for question in questions)
        if without_text or not with_text:
            problems.append(self._explain_missing(without_text))

    def _read_text(
        self, text: Path, picture: Path, category: str
    ) -> Iterator[AskedQuestion]:
        """The questions of one text file about a picture."""
        name = one_line(picture.relative_to(self.path), 200)
        source = PictureSource(str(picture), name, str(picture))
        for number, line in _read_lines(text, self._fix):
            question, _, answer = (
                part.strip() for part in line.strip().partition("\t")
            )
            if question:
                yield AskedQuestion(
                    f"{text}:{number}",
                    ask(question, source),
                    (answer,) if answer else (),
                    "yes_no" if answer.lower() in ("yes", "no") else "text",
                    category,
                )

    def _explain_missing(self, without_text: int) -> Problem:
        """Of a folder in which pictures have no question, or that has no picture."""
        what = "has no picture"
        fix = "name a folder with PNG or JPEG files"
        if without_text:
            shared = self.path / _SHARED
            what = f"has pictures without a question ({without_text})"
            fix = f"write {shared}, one question a line: each is asked about every picture"
        kinds = (".jsonl", ".json", ".tsv", ".csv")
        for file in sorted(self.path.iterdir()):
            if file.suffix in kinds and "annotations" not in file.name:
                fix = f"name its file of questions, {file}"
        return Problem(str(self.path), what, fix)


_SHARED = "questions.txt"
"""Name of the file of questions about every picture of its folder, or of all folders."""


def _list_section(
    folder: Path, problems: list[Problem]
) -> tuple[dict[str, Path], list[Path]]:
    """Texts by the names of their pictures, and pictures, in one folder or in MME's two in it.

    A text without its picture is added to ``problems``.
    """
    texts = folder / "questions_answers_YN"
    images = folder / "images"
    if not texts.is_dir():
        texts = folder
        images = folder
    by_name = {
        path.stem: path for path in sorted(texts.glob("*.txt")) if path.name != _SHARED
    }
    endings = {*Image.registered_extensions(), *VIDEOS}
    pictures = [
        path
        for path in sorted(images.iterdir() if images.is_dir() else ())
        if path.suffix.lower() in endings and path.name[0] != "."
    ]
    for stem in by_name.keys() - {path.stem for path in pictures}:
        what = f"has questions about no picture: {images} has none of its name"
        fix = f"rename it {_SHARED} if they are about every picture, or remove it"
        problems.append(Problem(str(by_name[stem]), what, fix))
    return by_name, pictures
