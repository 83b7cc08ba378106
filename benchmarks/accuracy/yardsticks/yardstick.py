"""A yardstick: a small trained model with questions, encoded once and scored in any case."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Protocol

from benchmarks.accuracy.yardsticks.cases import Budget, Case
from benchmarks.minillava.reader import AnswerScores
from benchmarks.minillava.split import Example, Split
from vllm_autoprune.tpdsl.tokens import Need, VisualTokens


@dataclass(frozen=True)
class CaseScores:
    """Scores of the reference answers to a batch, and K of each image of it."""

    answers: AnswerScores
    tokens: int


class EncodedBatch(Protocol):
    """Questions about a few images, with all that policies read of them."""

    tokens: VisualTokens

    def score(self, case: Case) -> CaseScores:
        """Score the answers to all questions of the batch in one case."""


class Yardstick(Protocol):
    """A model with its questions.

    ``default`` is the state that the evidence recommends for the model's family; ``eighth`` is the
    label of the budget that keeps an eighth of all tokens. ``usual_tokens`` is N of a usual image,
    and ``available`` are the inputs that a server of this backbone gives to policies.
    ``equal_policies`` keep the tokens of another base policy on this model, and have no row.
    ``categories`` has the kinds of questions of each category.
    """

    name: ClassVar[str]
    default: ClassVar[str]
    budgets: ClassVar[Sequence[Budget]]
    eighth: ClassVar[str]
    usual_tokens: ClassVar[int]
    available: ClassVar[frozenset[Need]]
    equal_policies: ClassVar[Collection[str]]
    categories: ClassVar[Mapping[str, Sequence[str]]]
    images_per_batch: ClassVar[int]

    @property
    def model(self) -> str:
        """Name and digest of the weights."""

    def draw(self, split: Split, images: int) -> Sequence[Example]:
        """The questions about the first images of a split."""

    def encode(self, batch: Sequence[Example]) -> EncodedBatch:
        """Encode the images of a batch of questions."""


def batches(yardstick: Yardstick, examples: Sequence[Example]) -> Iterator[list[Example]]:
    """The questions about a few images at a time; a batch is the same however many there are."""
    size = yardstick.images_per_batch
    for _, group in groupby(examples, key=lambda example: example.image_id // size):
        yield list(group)


def batch_digest(batch: Sequence[Example]) -> str:
    """Identifies the questions, answers and images of a batch."""
    digest = hashlib.sha256()
    image = -1
    for example in batch:
        if example.image_id != image:
            image = example.image_id
            digest.update(example.image.numpy().tobytes())
        digest.update(f"{example.question}\n{example.answer}\n".encode())
    return digest.hexdigest()[:12]
