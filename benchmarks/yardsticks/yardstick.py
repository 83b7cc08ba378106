"""A yardstick: a small trained model with questions, encoded once and scored in any case."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import ClassVar, Final, Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks.yardsticks.examples import Example, Split
from vllm_autoprune.serving.api.instruction import split_content_words
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import Need, VisualTokens

Control = Literal["full", "resized", "random", "oracle"]
FULL: Final = "full"
RESIZED: Final = "resized"
RANDOM: Final = "random"
ORACLE: Final = "oracle"


@dataclass(frozen=True)
class Budget:
    """K as a share of N, and its name in tables."""

    label: str
    share: Fraction

    def tokens(self, count: int) -> int:
        """K of an image of N tokens, rounded down."""
        return max(1, int(self.share * count))


ALL_TOKENS = Budget("all", Fraction(1))


@dataclass(frozen=True)
class Case:
    """One way to choose tokens, at one budget: a control, a state, or given indices ``(M, K)``.

    ``base`` is the base policy that a state refines, or the case that ranks after the merger where
    this one ranks before it: the one it is compared with.
    """

    name: str
    budget: Budget
    control: Control | None = None
    state: PruningState | None = None
    base: str = ""
    kept: Tensor | None = None

    @property
    def key(self) -> str:
        """Identifies what is measured: name, budget, and the state's digest."""
        digest = "" if self.state is None else f" {self.state.digest[:12]}"
        return f"{self.name} {self.budget.label}{digest}"

    @property
    def reads_question(self) -> bool | None:
        """Whether the question changes what is kept; None where that has no meaning."""
        if self.state is None:
            return None
        return materialize(self.state, max(16, self.state.budget.range()[1])).reads_instruction


@dataclass(frozen=True)
class AnswerScores:
    """Scores of the reference answers to M questions.

    right (M,) bool: greedy decoding gives exactly the reference answer and then stops; logprob (M,)
    float32: natural logarithm of the probability of the answer and its end token.
    """

    right: Tensor
    logprob: Tensor


@dataclass(frozen=True)
class CaseScores:
    """Scores of the reference answers to a batch, and K of each image of it."""

    answers: AnswerScores
    tokens: int


class EncodedBatch(Protocol):
    """Questions about a few images, with all that policies read of them."""

    @property
    def tokens(self) -> VisualTokens:
        """Inputs of policies, one row a question."""

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


def keep_tokens(
    examples: Sequence[Example], count: int, budget: int, control: Control | None
) -> Tensor:
    """Raster tokens (M, K), ascending, of images of `count`: random, but fixed for each question.

    The oracle keeps the question's evidence before them.
    """
    rows = []
    for example in examples:
        rng = random.Random(f"{example.image_id} {example.question}")
        evidence = example.evidence if control == ORACLE else ()
        order = dict.fromkeys((*evidence, *rng.sample(range(count), count)))
        rows.append(sorted([*order][:budget]))
    return torch.tensor(rows)


@dataclass(frozen=True)
class AnswerTexts:
    """Token ids of M questions and their reference answers, which end in the end token.

    `padded` (M, L) has both but for the end token. Padding is on the right, where the causal mask
    hides it from every real token.
    """

    questions: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]
    padded: Tensor

    def score(self, logits: Tensor) -> AnswerScores:
        """Score the answers by the logits (M, L, V) at `padded`."""
        right, logprob = [], []
        rows = logits.float().log_softmax(-1)
        for row, question, answer in zip(rows, self.questions, self.answers, strict=True):
            predicted = row[len(question) - 1 : len(question) - 1 + len(answer)]
            expected = torch.tensor(answer)
            right.append(bool((predicted.argmax(-1) == expected).all()))
            logprob.append(predicted.gather(1, expected[:, None]).sum())
        return AnswerScores(torch.tensor(right), torch.stack(logprob))


def tokenize_answers(
    tokenizer: PreTrainedTokenizerBase, template: str, examples: Sequence[Example]
) -> AnswerTexts:
    """Ids of questions in the part of the prompt behind the image, and of their answers."""
    questions = [
        token_ids(tokenizer, template.format(question=example.question)) for example in examples
    ]
    end = tokenizer.eos_token_id
    answers = [[*token_ids(tokenizer, f" {example.answer}"), end] for example in examples]
    texts = [ids + answer[:-1] for ids, answer in zip(questions, answers, strict=True)]
    padded, _ = pad_ids([[*ids] for ids in texts])
    return AnswerTexts(questions, answers, padded)


def content_words(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]
) -> tuple[Tensor, Tensor]:
    """Ids (M, W) of the questions' content words, and which of them are no padding."""
    words = [split_content_words(example.question) for example in examples]
    return pad_ids([[token for word in row for token in token_ids(tokenizer, word)]
                    for row in words])  # fmt: skip


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a text without special tokens of its own."""
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def pad_ids(rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids (M, L) padded on the right with the last of each row, and which are no padding."""
    longest = max(map(len, rows))
    padded = torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows])
    return padded, torch.arange(longest) < torch.tensor([[len(row)] for row in rows])
