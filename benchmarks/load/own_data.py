"""Questions of one's own for a load test, which share no picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import BenchmarkError
from vllm_autoprune.errors import Problem
from vllm_autoprune.evaluation.asked_question import AskedQuestion
from vllm_autoprune.evaluation.questions import read_asked, refuse


def choose_questions(
    data: Path, count: int, part: int, cache: str
) -> Sequence[AskedQuestion]:
    """The questions of part number ``part``, in the order of the data; a part has ``count``.

    Raises :class:`ConfigError` for unreadable data, :class:`BenchmarkError` for too little.
    """
    if cache == "same-image":
        what = "asks each image another question, which own data may not have"
        raise BenchmarkError.of("--cache same-image", what, "give --cache repeat")
    problems = list[Problem]()
    questions = read_asked(data, problems, "give the path of questions about pictures")
    refuse("data", problems)
    distinct = list(_drop_shared(questions))
    chosen = distinct[part * count : (part + 1) * count]
    if len(chosen) < count:
        what = f"has {len(distinct)} questions that share no picture, and load {part + 1} needs "
        what += f"{(part + 1) * count} with those before it"
        fix = "give fewer --requests and --warm-up, or --cache repeat and a smaller --pool"
        raise BenchmarkError.of(str(data), what, fix)
    return chosen


def _drop_shared(questions: Sequence[AskedQuestion]) -> Iterator[AskedQuestion]:
    """The questions that share no picture with an earlier one, which would leave it in a cache."""
    seen = set[str]()
    for question in questions:
        digests = {picture.digest for picture in question.pictures}
        if seen.isdisjoint(digests):
            yield question
            seen |= digests
