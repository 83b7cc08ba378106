"""Evaluator on a yardstick in this process, for comparisons that need thousands of evaluations.

Vision features of every image are computed once, so a candidate costs a selection and one forward
pass of the language model over K tokens and the question. The splits use disjoint seeds, which
training does not use; mini-LLaVA's are also a data folder of `vllm-autoprune search`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from random import Random

from benchmarks.yardsticks.examples import Example as SceneQuestion
from benchmarks.yardsticks.examples import draw_examples, png
from benchmarks.yardsticks.yardstick import (
    ALL_TOKENS,
    FULL,
    Budget,
    Case,
    EncodedBatch,
    Yardstick,
    batches,
)
from offline_search.components import SelectionProgram
from offline_search.dataset import SPLITS, Dataset, Split, write_split
from offline_search.evaluator import EvaluationJob
from offline_search.history import Answers
from offline_search.programs import select_with_program
from vllm_autoprune.errors import AutopruneError, EvaluationFailed
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import VisualTokens

_PROBE_IMAGES = 16

_QUESTIONS_PER_BATCH = 32
"""Questions that one forward pass scores where a batch may hold several images."""


class YardstickEvaluator:
    """Evaluator of one yardstick on a number of images of each split, shared by many searches.

    A job is measured once, as searches meet the same candidates. K of a job is that of an image of
    the yardstick's usual number of tokens; one of another size keeps the same share.
    """

    def __init__(
        self,
        yardstick: Yardstick,
        images: dict[Split, int],
        *,
        each: int | None = None,
        base_policy: str = "cdpruner",
    ) -> None:
        """``each`` is the maximum number of questions about one image.

        Programs that select tokens are given the picks of ``base_policy``.
        """
        self._base_policy = base_policy
        self._yardstick = yardstick
        self._batches: dict[Split, list[list[SceneQuestion]]] = {}
        for split in SPLITS:
            questions = _sample_questions(yardstick.draw(split, images[split]), each)
            self._batches[split] = list(_merge(batches(yardstick, questions), yardstick))
        examples = {
            split: [
                _as_example(split, question) for batch in self._batches[split] for question in batch
            ]
            for split in SPLITS
        }
        self.dataset = Dataset(Path(yardstick.name), examples)
        self._encoded: dict[tuple[Split, int], EncodedBatch] = {}
        self._answers: dict[EvaluationJob, Answers] = {}
        data = self.dataset.digest[:12]
        self.name = f"{yardstick.model} with transformers, data {data}"

    def probes(self) -> Sequence[VisualTokens]:
        """Visual tokens of the first batches of the search split."""
        probes, images = list[VisualTokens](), set[int]()
        for number, batch in enumerate(self._batches["search"]):
            if len(images) < _PROBE_IMAGES:
                probes.append(self._encode("search", number, batch).tokens)
                images |= {question.image_id for question in batch}
        return probes

    async def prepare(self) -> None:
        """Does nothing: the checkpoint is loaded at the first use."""

    async def close(self) -> None:
        """Does nothing."""

    async def evaluate(self, job: EvaluationJob) -> Answers:
        """The answers to a job, computed in whole batches of images."""
        if job in self._answers:
            return self._answers[job]
        logprob: list[float] = []
        right: list[bool] = []
        program = job.candidate if isinstance(job.candidate, SelectionProgram) else None
        state = job.candidate if isinstance(job.candidate, PruningState) else None
        case, begin = Case(FULL, ALL_TOKENS, FULL), 0
        if job.candidate is not None:
            budget = Budget(f"K = {job.budget}", Fraction(job.budget, self._yardstick.usual_tokens))
            case = Case("candidate", budget, state=state)
        try:
            for number, batch in enumerate(self._batches[job.split]):
                selected = slice(max(job.start - begin, 0), max(job.stop - begin, 0))
                begin += len(batch)
                if batch[selected]:
                    encoded = self._encode(job.split, number, batch)
                    if program is not None:
                        count = case.budget.tokens(encoded.tokens.count)
                        picks = await select_with_program(
                            program, encoded.tokens, self._base_policy, count
                        )
                        case = replace(case, kept=picks)
                    scores = encoded.score(case)
                    logprob += scores.logprob[selected].tolist()
                    right += scores.right[selected].tolist()
        except AutopruneError as error:
            raise EvaluationFailed(str(error)) from None
        self._answers[job] = Answers(tuple(logprob), tuple(map(bool, right)))
        return self._answers[job]

    def _encode(self, split: Split, number: int, batch: list[SceneQuestion]) -> EncodedBatch:
        key = (split, number)
        if key not in self._encoded:
            self._encoded[key] = self._yardstick.encode(batch)
        return self._encoded[key]


def _merge(
    small: Iterable[list[SceneQuestion]], yardstick: Yardstick
) -> Iterator[list[SceneQuestion]]:
    """Join batches up to the usual number of questions, unless every image needs its own."""
    if yardstick.images_per_batch == 1:
        yield from small
        return
    joined: list[SceneQuestion] = []
    for batch in small:
        if joined and len(joined) + len(batch) > _QUESTIONS_PER_BATCH:
            yield joined
            joined = []
        joined += batch
    yield joined


def _sample_questions(
    questions: Sequence[SceneQuestion], each: int | None
) -> Sequence[SceneQuestion]:
    """At most ``each`` questions about every image, a random sample that keeps pairs together.

    Scores of questions about one image are correlated, so few questions about many images give a
    more precise estimate than many about few.
    """
    if each is None:
        return questions
    sample: list[tuple[int, SceneQuestion]] = []
    for scene, about in groupby(enumerate(questions), key=lambda item: item[1].image_id):
        # A question that has no pair is a group of its own.
        by_pair = groupby(about, key=lambda item: ("alone", item[0]) if item[1].pair is None
                          else ("pair", item[1].pair))  # fmt: skip
        groups = [list(group) for _, group in by_pair]
        Random(scene).shuffle(groups)
        size = 0
        for group in groups:
            if size + len(group) <= each:
                sample += group
                size += len(group)
    return [question for _, question in sorted(sample, key=lambda item: item[0])]


def write_data(folder: Path, scenes: Mapping[Split, int], *, each: int | None = None) -> None:
    """Write a data folder: images and the three splits."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        questions = _sample_questions(draw_examples(split, scenes[split]), each)
        for question in questions:
            path = folder / _image_name(split, question)
            if not path.exists():
                path.write_bytes(png(question.image))
        examples = [_as_example(split, question) for question in questions]
        write_split(folder / f"{split}.jsonl", examples)


def _as_example(split: Split, question: SceneQuestion) -> Example:
    """A scene question as an example of the search."""
    return Example(
        image=_image_name(split, question),
        question=question.question,
        answer=question.answer,
        category=question.kind,
        pair=question.pair,
    )


def _image_name(split: Split, question: SceneQuestion) -> str:
    """Path of an image within the data folder."""
    return f"images/{split}-{question.image_id}.png"
