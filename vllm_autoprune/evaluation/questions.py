"""The user's own questions, which are read, checked against each other, and ordered."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from pydantic import Field
from tqdm import tqdm

from vllm_autoprune.connection import Connection
from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.asked_question import AskedQuestion, render
from vllm_autoprune.evaluation.data_sets.registry import Text
from vllm_autoprune.evaluation.journal import MME, PAIRS, Question
from vllm_autoprune.evaluation.pictures import Picture, PictureSource, read_picture
from vllm_autoprune.evaluation.question_reader import QuestionReader
from vllm_autoprune.record_file import FrozenModel

_MAX_PROBLEMS = 20


def refuse(subject: str, problems: Sequence[Problem]) -> None:
    """Raise :class:`ConfigError` with the first twenty of ``problems``, if there are any."""
    if (more := len(problems) - _MAX_PROBLEMS) > 0:
        count = Problem(subject, f"{more} more problems", "fix those above first")
        problems = [*problems[:_MAX_PROBLEMS], count]
    if problems:
        raise ConfigError(subject, problems)


class Example(FrozenModel):
    """A question of a search about one image; images with equal content have one name."""

    image: Text
    question: Text
    answer: Text
    category: Text = "all"
    pair: int | None = None
    model: str = Field(default="", exclude_if=lambda name: not name)
    """The model that is asked, where a search has several."""

    @property
    def stratum(self) -> str:
        """The category, of the model that is asked."""
        return f"{self.model}: {self.category}" if self.model else self.category


def read_examples(
    path: Path, problems: list[Problem], fix: str
) -> tuple[list[Example], dict[str, Picture]]:
    """Examples of a search from one file or folder, and their pictures by name.

    If a question has several answers, the most frequent counts. Problems are added to ``problems``;
    ``fix`` is the advice for a file that cannot be read.
    """
    examples = list[Example]()
    pictures = dict[str, Picture]()
    for question in read_asked(path, problems, fix):
        what = ""
        if not question.answers:
            what = "has no answer"
            fix = "give one: a search compares states by its probability"
        elif (
            len(question.pictures) != 1
            or len(question.turns) != 1
            or question.pictures[0].is_video
        ):
            what = "is not one turn about one image"
            fix = "leave it out of a search"
        if what:
            problems.append(Problem(question.where, what, fix))
            continue
        (picture,) = question.pictures
        pictures[picture.name] = picture
        ((answer, _),) = Counter(question.answers).most_common(1)
        examples.append(
            Example(
                image=picture.name,
                question=question.text,
                answer=answer,
                category=question.category,
                pair=question.pair,
            )
        )
    return examples, pictures


@dataclass(frozen=True, kw_only=True)
class PreparedQuestion(AskedQuestion):
    """A question with its record in the journal."""

    record: Question


def read_questions(
    path: Path,
    limit: int | None = None,
    *,
    images: Path | None = None,
    connection: Connection | None = None,
    unlabelled: bool = False,
    frames: int = 0,
) -> Sequence[PreparedQuestion]:
    """The first ``limit`` questions of a file or folder, ordered by image; raises ConfigError.

    Pictures are searched for beside the file, or in ``images``. ``unlabelled``: whether questions
    may have no answer. ``frames``: number of frames sampled of a video; above 0, all questions have
    to be about videos. The error lists every problem with its line. A pair is left out if
    ``limit`` excludes one of its questions.
    """
    problems: list[Problem] = []
    fix = "give the path of questions, or of a folder of pictures"
    asked = read_asked(path, problems, fix, limit, images, connection)
    without = [question.where for question in asked if not question.answers]
    if without and not unlabelled:
        what = f"{len(without)} of {len(asked)} questions have no answer"
        fix = (
            "add --reference unpruned, which compares with the unpruned model's answers"
        )
        problems.append(Problem(without[0], what, fix))
    for question in asked:
        videos = [picture for picture in question.pictures if picture.is_video]
        # If vLLM reads all frames of a file, the model's processor samples them again.
        few = min((v.frames - (not v.path.is_dir()) for v in videos), default=frames)
        what = "asks about a video"
        fix = "add --frames 32, or leave it out"
        if frames and not videos:
            what = "asks about no video"
            fix = "leave out the question, or --frames"
        elif frames:
            what = f"asks about a video of which {few} frames can be sampled"
            fix = f"give --frames {few} or fewer, or leave it out"
        if bool(videos) != (frames > 0) or few < frames:
            problems.append(Problem(question.where, what, fix))
    refuse("data", problems)
    # Questions about one image follow each other, so that its features are computed once.
    names = [question.pictures[0].name for question in asked]
    order = {name: index for index, name in enumerate(dict.fromkeys(names))}
    numbered = sorted(enumerate(asked), key=lambda pair: order[names[pair[0]]])
    sizes = Counter(
        (name, question.pair) for name, question in zip(names, asked, strict=True)
    )
    questions = []
    for number, question in numbered:
        paired = question.pair is not None
        category = question.category
        if paired and sizes[names[number], question.pair] < 2:
            continue
        # These names are reserved for questions that are scored in pairs.
        single = f"{category} without pairs" if category in (MME, PAIRS) else category
        record = Question(
            id=str(number),
            benchmark=PAIRS if paired else single,
            image=names[number],
            category=category if paired else "",
            pair=f"{names[number]}/{question.pair}" if paired else "",
        )
        questions.append(PreparedQuestion(**vars(question), record=record))
    return questions


def read_asked(
    path: Path,
    problems: list[Problem],
    fix: str,
    limit: int | None = None,
    images: Path | None = None,
    connection: Connection | None = None,
) -> list[AskedQuestion]:
    """Questions of a file or folder in order; pictures with equal content get one name."""
    earlier = len(problems)
    reader = QuestionReader(path, images, fix)
    read = dict[str, Picture | ConfigError]()
    by_content = dict[str, Picture]()

    def read_once(source: PictureSource) -> Picture:
        if source.address not in read:
            try:
                decoded = read_picture(source, connection)
                read[source.address] = by_content.setdefault(decoded.digest, decoded)
            except ConfigError as error:
                read[source.address] = error
        picture = read[source.address]
        if isinstance(picture, ConfigError):
            raise picture
        return picture

    questions = list[AskedQuestion]()
    for question in tqdm(
        islice(reader.read(problems), limit), unit="question", delay=5, mininterval=5
    ):
        try:
            questions.append(replace(question, turns=render(question.turns, read_once)))
        except ConfigError as error:
            problems += error.problems
    # The problem of a picture that several questions have is reported once.
    problems[earlier:] = dict.fromkeys(problems[earlier:])
    for note in reader.file.notes():
        print(f"{path}: {note}", file=sys.stderr)
    if not questions and len(problems) == earlier:
        what = "contains no question about a picture"
        fix = "give it at least one"
        problems.append(Problem(str(path), what, fix))
    if len(problems) == earlier:
        problems += _find_contradictions(questions, cut=len(questions) == limit)
    return questions


def _find_contradictions(
    questions: Sequence[AskedQuestion], *, cut: bool
) -> Iterator[Problem]:
    """Problems of equal questions with different answers; without any, of malformed pairs.

    A pair needs one "yes" and one "no". ``cut``: whether a limit may have excluded half of a pair.
    """
    answers: dict[str, AskedQuestion] = {}
    pairs: dict[tuple[str, int], list[AskedQuestion]] = {}
    contradicts = False
    for question in questions:
        earlier = answers.setdefault(question.digest, question)
        if len(question.answers) == 1 and not any(
            map(question.score_text, earlier.answers)
        ):
            contradicts = True
            what = f"has another answer than {earlier.where} to the same question about one image"
            yield Problem(
                question.where, what, "keep one of them: only one can be exact"
            )
        if question.pair is not None:
            pairs.setdefault((question.pictures[0].name, question.pair), []).append(
                question
            )
    for (image, pair), members in () if contradicts else pairs.items():
        words = sorted(
            answer.strip().lower() for member in members for answer in member.answers
        )
        if words != ["no", "yes"] and not (cut and len(members) == 1):
            lines = ", ".join(
                member.where.rpartition(":")[2].strip() for member in members
            )
            about = f'"pair": {str(pair)[:40]} about {image!r}'
            what = f'{about} is not one "yes" and one "no" (lines {lines})'
            fix = "give a pair two questions about one image with these answers, or leave it out"
            yield Problem(members[0].where, what, fix)
