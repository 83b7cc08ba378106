"""Evaluator on a yardstick in this process, for comparisons that need thousands of evaluations.

Vision features of every image are computed once, so a candidate costs a selection and one forward
pass of the language model over K tokens and the question. The splits use disjoint seeds, which
training does not use; mini-LLaVA's are also a data folder of `vllm-autoprune search`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
from vllm_autoprune.tpdsl.tokens import VisualTokens

_PROBE_IMAGES = 16

_QUESTIONS_PER_BATCH = 32
"""Questions that one forward pass scores where a batch may hold several images."""


class YardstickEvaluator:
    """Evaluator of one yardstick on a number of images of each split.

    K of a job is that of an image with the yardstick's usual number of tokens; an image of another
    size keeps the same share.
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
            split: [_as_example(split, one) for batch in self._batches[split] for one in batch]
            for split in SPLITS
        }
        self.dataset = Dataset(Path(yardstick.name), examples)
        self._encoded: dict[tuple[Split, int], EncodedBatch] = {}
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
        logprob: list[float] = []
        right: list[bool] = []
        case = self._case(job)
        begin = 0
        try:
            for number, batch in enumerate(self._batches[job.split]):
                selected = slice(max(job.start - begin, 0), max(job.stop - begin, 0))
                begin += len(batch)
                if batch[selected]:
                    encoded = self._encode(job.split, number, batch)
                    if isinstance(job.candidate, SelectionProgram):
                        case = await self._run_program(job.candidate, case.budget, encoded.tokens)
                    scores = encoded.score(case).answers
                    logprob += scores.logprob[selected].tolist()
                    right += scores.right[selected].tolist()
        except AutopruneError as error:
            raise EvaluationFailed(str(error)) from None
        return Answers(tuple(logprob), tuple(map(bool, right)))

    def _case(self, job: EvaluationJob) -> Case:
        if job.candidate is None:
            return Case(FULL, ALL_TOKENS, FULL)
        budget = Budget(f"K = {job.budget}", Fraction(job.budget, self._yardstick.usual_tokens))
        if isinstance(job.candidate, SelectionProgram):
            return Case("program", budget)
        return Case(job.candidate.name, budget, state=job.candidate)

    async def _run_program(
        self, program: SelectionProgram, budget: Budget, tokens: VisualTokens
    ) -> Case:
        """The case of the tokens that a program keeps of each image of a batch."""
        count = budget.tokens(tokens.count)
        kept = await select_with_program(program, tokens, self._base_policy, count)
        return Case("program", budget, kept=kept)

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
    by_scene = groupby(questions, key=lambda question: question.image_id)
    return [
        question
        for scene, group in by_scene
        for question in _sample(list(group), each, Random(scene))
    ]


def _sample(questions: list[SceneQuestion], size: int, rng: Random) -> list[SceneQuestion]:
    """A random sample of one scene's questions without incomplete pairs, in their order."""
    groups = [list(group) for _, group in groupby(enumerate(questions), key=_pair_key)]
    rng.shuffle(groups)
    sample: list[tuple[int, SceneQuestion]] = []
    for group in groups:
        if len(sample) + len(group) <= size:
            sample += group
    return [question for _, question in sorted(sample, key=lambda numbered: numbered[0])]


def _pair_key(numbered: tuple[int, SceneQuestion]) -> tuple[str, int]:
    index, question = numbered
    return ("alone", index) if question.pair is None else ("pair", question.pair)


def write_data(folder: Path, scenes: dict[Split, int], *, each: int | None = None) -> None:
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
