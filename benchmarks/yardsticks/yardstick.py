"""A yardstick: a small trained model with questions, encoded once and scored in any case."""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import ClassVar, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from benchmarks.yardsticks.examples import (
    CHECKPOINTS,
    Example,
    Split,
    draw_examples,
    weights_digest,
)
from benchmarks.yardsticks.questions import CATEGORIES, Model
from vllm_autoprune.ops.rowwise import gather_rows
from vllm_autoprune.serving.api.instruction import split_content_words
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import refine
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
class Scores:
    """Scores of the reference answers to M questions, each about an image of K tokens.

    right (M,) bool: greedy decoding gives exactly the reference answer and then stops; logprob (M,)
    float32: natural logarithm of the probability of the answer and its end token.
    """

    right: Tensor
    logprob: Tensor
    tokens: int


class EncodedBatch(ABC):
    """Questions about a few images, with all that policies read of them, one row a question."""

    def __init__(self, batch: Sequence[Example], tokens: VisualTokens) -> None:
        self.batch, self.tokens = batch, tokens

    @torch.no_grad()
    def score(self, case: Case) -> Scores:
        """Score the answers to all questions of the batch in one case."""
        tokens = self.tokens
        count, budget = tokens.count, case.budget.tokens(tokens.count)
        if case.control == RESIZED:
            return self.score_resized(budget)
        if case.state is not None:
            refined = refine(materialize(case.state, budget), tokens)
            return self.score_kept(refined.indices, refined.features)
        kept = case.kept
        if case.control == FULL:
            kept = torch.arange(count).expand(len(self.batch), -1)
        elif kept is None:
            kept = keep_tokens(self.batch, count, budget, case.control)
        return self.score_kept(kept, gather_rows(tokens.features, kept))

    @abstractmethod
    def score_kept(self, kept: Tensor, rows: Tensor) -> Scores:
        """Score the answers given raster tokens (M, K) with the rows (M, K, D)."""

    @abstractmethod
    def score_resized(self, budget: int) -> Scores:
        """Score the answers given the resized images."""


class Yardstick(ABC):
    """A checkpoint with its questions, loaded at first use.

    ``key`` is the model's name in commands, ``default`` the state that the evidence recommends for
    its family; ``eighth`` is the label of the budget that keeps an eighth of all tokens.
    ``usual_tokens`` is N of a usual image, and ``available`` are the inputs that a server of this
    backbone gives to policies. ``equal_policies`` keep the tokens of another base policy on this
    model, and have no row. ``images_per_batch`` images may be encoded together.
    """

    name: ClassVar[str]
    key: ClassVar[Model]
    default: ClassVar[str]
    budgets: ClassVar[Sequence[Budget]]
    eighth: ClassVar[str]
    usual_tokens: ClassVar[int]
    available: ClassVar[frozenset[Need]]
    equal_policies: ClassVar[Collection[str]] = ()
    images_per_batch: ClassVar[int] = 1

    def __init__(self, checkpoint: Path | None = None) -> None:
        """Without a checkpoint, the committed one."""
        self._checkpoint = checkpoint or CHECKPOINTS[self.key]

    @cached_property
    def model(self) -> str:
        """Name and digest of the weights, as in the evidence of shipped states."""
        return f"{self.name} {weights_digest(self._checkpoint)}"

    @property
    def categories(self) -> Mapping[str, Sequence[str]]:
        """The kinds of questions of each category."""
        return CATEGORIES[self.key]

    def draw(self, split: Split, images: int) -> Sequence[Example]:
        """The questions about the first images of a split."""
        return draw_examples(split, images, self.key)

    @abstractmethod
    def encode(self, batch: Sequence[Example]) -> EncodedBatch:
        """Encode the images of a batch of questions, with all inputs of policies."""


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
class _AnswerTexts:
    """Token ids of M questions and their reference answers, which end in the end token.

    `padded` (M, L) has both but for the end token. Padding is on the right, where the causal mask
    hides it from every real token.
    """

    questions: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]
    padded: Tensor

    def score(self, logits: Tensor, tokens: int) -> Scores:
        """Score the answers by the logits (M, L, V) at `padded`."""
        right, logprob = [], []
        rows = logits.float().log_softmax(-1)
        for row, question, answer in zip(rows, self.questions, self.answers, strict=True):
            predicted = row[len(question) - 1 : len(question) - 1 + len(answer)]
            expected = torch.tensor(answer)
            right.append(bool((predicted.argmax(-1) == expected).all()))
            logprob.append(predicted.gather(1, expected[:, None]).sum())
        return Scores(torch.tensor(right), torch.stack(logprob), tokens)


def tokenize_answers(
    tokenizer: PreTrainedTokenizerBase, template: str, examples: Sequence[Example]
) -> _AnswerTexts:
    """Ids of questions in the part of the prompt behind the image, and of their answers."""
    questions = [
        token_ids(tokenizer, template.format(question=example.question)) for example in examples
    ]
    end = tokenizer.eos_token_id
    answers = [[*token_ids(tokenizer, f" {example.answer}"), end] for example in examples]
    texts = [ids + answer[:-1] for ids, answer in zip(questions, answers, strict=True)]
    return _AnswerTexts(questions, answers, pad_ids(texts)[0])


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


class Call(NamedTuple):
    """Arguments and result of one call of a module."""

    args: tuple[Tensor, ...]
    kwargs: Mapping[str, object]
    output: Tensor


@contextmanager
def record_calls(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Call]]:
    """Record the last call of each named submodule while the context is open."""
    calls: dict[str, Call] = {}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda _, args, kwargs, output, name=name: calls.update(
                {name: Call(args, kwargs, output)}
            ),
            with_kwargs=True,
        )
        for name in names
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
