"""Evaluator on a yardstick in this process, for comparisons that need thousands of evaluations.

Vision features of every image are computed once, so a candidate costs a selection and one forward
pass of the language model over K tokens and the question. The splits are drawn with disjoint seeds
that training does not use. `vllm-autoprune search` can read them too, as a data folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain, groupby
from pathlib import Path
from random import Random

from benchmarks.common.report import log_progress
from benchmarks.yardsticks.examples import Example as SceneQuestion
from benchmarks.yardsticks.examples import as_picture, draw_examples
from benchmarks.yardsticks.questions import Model
from benchmarks.yardsticks.yardstick import (
    ALL_TOKENS,
    Budget,
    Case,
    EncodedBatch,
    Yardstick,
)
from offline_search.dataset import SPLITS, Dataset, Split, stratify, write_split
from offline_search.evaluator import EvaluationJob
from offline_search.history import Answers
from offline_search.image_facts import ImageFacts
from offline_search.probes import Probes
from vllm_autoprune.errors import AutopruneError, EvaluationFailed
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.tpdsl.tokens import VisualTokens

_PROBE_IMAGES = 16
_QUESTIONS_PER_BATCH = 32
"""Number of questions that one forward pass scores if a batch may hold several images."""


class YardstickEvaluator:
    """Evaluator of one yardstick on a number of images of each split, shared by many searches.

    A job is measured once and its answers are kept, because searches meet the same candidates. K of
    a job is a share of N, or meant for an image of the yardstick's usual size; an image of another
    size keeps the same share of its tokens.
    """

    def __init__(
        self,
        yardstick: Yardstick,
        images: Mapping[Split, int],
        each: int | None = None,
        block: int | None = None,
    ) -> None:
        """``each`` is the maximum number of questions about one image.

        If the search split has more than ``block`` questions, they are put in stratified order.
        """
        self._yardstick = yardstick
        self._batches: dict[Split, list[list[SceneQuestion]]] = {}
        for split in SPLITS:
            questions = _sample_questions(
                draw_examples(split, images[split], yardstick.key), each
            )
            if split == "search" and block is not None and len(questions) > block:
                order = stratify(
                    [(str(each.image_id), each.kind) for each in questions], 0
                )
                questions = [questions[index] for index in order]
            joined: list[list[SceneQuestion]] = [[]]
            for batch in yardstick.batches(questions):
                full = len(joined[-1]) + len(batch) > _QUESTIONS_PER_BATCH
                if joined[-1] and (full or yardstick.images_per_batch == 1):
                    joined.append([])
                joined[-1] += batch
            self._batches[split] = joined
        examples = {
            split: [
                _as_example(split, question) for batch in batches for question in batch
            ]
            for split, batches in self._batches.items()
        }
        self.dataset = Dataset(Path(yardstick.name), examples)
        self.model = yardstick.model
        self.key = yardstick.key
        self.name = f"{self.model} with transformers, data {self.dataset.digest[:12]}"
        self._encoded: dict[tuple[Split, int], EncodedBatch] = {}
        self._answers: dict[EvaluationJob, Answers] = {}

    image_facts: Mapping[str, ImageFacts] = {}
    """Probes have them."""

    def probes(self) -> Probes:
        """Visual tokens of the first batches of the search split."""
        return {"": self.encode_probes()}

    def encode_probes(self) -> Sequence[VisualTokens]:
        """Visual tokens of the first batches of the search split."""
        probes = list[VisualTokens]()
        images = set[int]()
        for number, batch in enumerate(self._batches["search"]):
            if len(images) < _PROBE_IMAGES:
                probes.append(self._encode("search", number).tokens)
                images |= {question.image_id for question in batch}
        return probes

    async def evaluate(self, job: EvaluationJob) -> Answers:
        """Answers to the questions of a job; they are computed in whole batches of images."""
        if job in self._answers:
            return self._answers[job]
        case = Case("full", ALL_TOKENS)
        if job.candidate is not None:
            share = Fraction(job.budget)
            if isinstance(job.budget, int):
                share /= self._yardstick.usual_tokens
            budget = Budget(f"K = {job.budget}", share)
            case = Case("candidate", budget, state=job.candidate)
        logprob = list[float]()
        correct = list[bool]()
        begin = 0
        for number, batch in enumerate(self._batches[job.split]):
            selected = slice(max(job.start - begin, 0), max(job.stop - begin, 0))
            begin += len(batch)
            if batch[selected]:
                try:
                    scores = self._encode(job.split, number).score(case)
                except AutopruneError as error:
                    name = self._yardstick.name
                    raise EvaluationFailed.of(name, str(error)) from None
                logprob += scores.logprob[selected].tolist()
                correct += map(bool, scores.correct[selected].tolist())
        self._answers[job] = Answers(tuple(logprob), tuple(correct))
        return self._answers[job]

    def _encode(self, split: Split, number: int) -> EncodedBatch:
        key = (split, number)
        if key not in self._encoded:
            self._encoded[key] = self._yardstick.encode(self._batches[split][number])
        return self._encoded[key]


class JointEvaluator:
    """Evaluator of several yardsticks, which are asked in turn, each about its own pictures.

    All are asked equally many questions of a split; what some have more is left out.
    """

    def __init__(self, evaluators: Sequence[YardstickEvaluator]) -> None:
        """``evaluators`` of different yardsticks."""
        self._evaluators = evaluators
        splits: dict[Split, Sequence[Example]] = {}
        for split in SPLITS:
            columns = [
                [
                    _name_model(example, each.key)
                    for example in each.dataset.splits[split]
                ]
                for each in evaluators
            ]
            splits[split] = list(chain.from_iterable(zip(*columns, strict=False)))
        self.dataset = Dataset(Path(), splits)
        names = " and ".join(evaluator.model for evaluator in evaluators)
        self.name = f"{names} with transformers, data {self.dataset.digest[:12]}"

    image_facts: Mapping[str, ImageFacts] = {}
    """Probes have them."""

    def probes(self) -> Probes:
        """Visual tokens of all yardsticks."""
        return {each.key: each.encode_probes() for each in self._evaluators}

    async def evaluate(self, job: EvaluationJob) -> Answers:
        """Answers to the questions of a job, in which the yardsticks take turns."""
        count = len(self._evaluators)
        answers: list[tuple[float, bool]] = [(0.0, False)] * job.stop
        for number, evaluator in enumerate(self._evaluators):
            # Question q of this yardstick is question q * count + number of all.
            start = -((number - job.start) // count)
            stop = -((number - job.stop) // count)
            part = await evaluator.evaluate(replace(job, start=start, stop=stop))
            turns = slice(start * count + number, stop * count + number, count)
            answers[turns] = zip(part.logprob, part.right, strict=True)
        logprob, right = zip(*answers[job.start :], strict=True)
        return Answers(logprob, right)


def _name_model(example: Example, model: str) -> Example:
    """A question that a yardstick is asked; pictures of two yardsticks have different names."""
    update = {"model": model, "image": f"{model}/{example.image}"}
    return example.model_copy(update=update)


def _sample_questions(
    questions: Sequence[SceneQuestion], each: int | None
) -> Sequence[SceneQuestion]:
    """A random sample of at most ``each`` questions about every image, which keeps pairs together.

    Scores of questions about one image are correlated, so few questions about many images give a
    more precise estimate than many about few.
    """
    if each is None:
        return questions
    sample: list[tuple[int, SceneQuestion]] = []
    for scene, about in groupby(
        enumerate(questions), key=lambda item: item[1].image_id
    ):
        # A question without a pair forms a group of its own.
        by_pair = groupby(
            about,
            key=lambda item: (
                ("alone", item[0]) if item[1].pair is None else ("pair", item[1].pair)
            ),
        )
        groups = [list(group) for _, group in by_pair]
        Random(scene).shuffle(groups)
        size = 0
        for group in groups:
            if size + len(group) <= each:
                sample += group
                size += len(group)
    return [question for _, question in sorted(sample, key=lambda item: item[0])]


def write_data(
    folder: Path,
    scenes: Mapping[Split, int],
    *,
    each: int | None = None,
    model: Model = "minillava",
    clean: bool = False,
    brief_frames: int | None = None,
) -> None:
    """Write a data folder of a yardstick: the splits of :func:`draw_examples`, and their images.

    A clip is written as a folder of frames.
    """
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        log_progress(f"{split}: draw {scenes[split]} scenes")
        drawn = draw_examples(
            split, scenes[split], model, clean=clean, brief_frames=brief_frames
        )
        questions = _sample_questions(drawn, each)
        examples = [_as_example(split, question) for question in questions]
        images = {
            e.image: question for e, question in zip(examples, questions, strict=True)
        }
        for name, question in images.items():
            path = folder / name
            if question.is_clip:
                path.mkdir(exist_ok=True)
                for number, frame in enumerate(question.image):
                    as_picture(frame).save(path / f"{number:02}.png")
            else:
                path.write_bytes(question.png)
        write_split(folder / f"{split}.jsonl", examples)


def _as_example(split: Split, question: SceneQuestion) -> Example:
    """A scene question as an example of a data folder of the search."""
    suffix = "" if question.is_clip else ".png"
    return Example(
        image=f"images/{split}-{question.image_id}{suffix}",
        question=question.question,
        answer=question.answer,
        category=question.kind,
        pair=question.pair,
    )
