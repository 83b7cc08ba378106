"""A yardstick: a small trained model with questions, encoded once and scored in any case."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from benchmarks.yardsticks.examples import (
    CHECKPOINTS,
    PROMPT,
    Example,
    keep_first,
    weights_digest,
)
from benchmarks.yardsticks.questions import Model
from vllm_autoprune.ops.rowwise import gather_rows
from vllm_autoprune.serving.api.instruction import split_content_words
from vllm_autoprune.tpdsl.base_policy import RefinedTokens
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import Need, Positions, VisualTokens, Words


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
    """One way to choose tokens, at one budget: a state or, by its name, a control.

    Controls are all tokens (``full``), the image ``resized`` to K, K tokens at ``random``, and
    those that the answer is in before them (``oracle``).
    ``base`` is the base policy that a state refines, or the case that ranks after the merger where
    this one ranks before it: the one it is compared with.
    """

    name: str
    budget: Budget
    state: PruningState | None = None
    base: str = ""


@dataclass(frozen=True)
class Scores:
    """Scores of the reference answers to M questions, each about an image of K tokens.

    correct (M,) bool: greedy decoding gives exactly the reference answer and then stops; logprob
    (M,) float32: natural logarithm of the probability of the answer and its end token.
    """

    correct: Tensor
    logprob: Tensor
    tokens: int


@dataclass(frozen=True)
class EncodedBatch:
    """Questions about a few images, with all that policies read of them, one row a question.

    ``score_kept`` scores the answers given raster tokens ``(M, P)`` with rows ``(M, K, D)``, the
    first P of which are theirs, at places ``(M, K)`` of the whole image, None for one after the
    other; ``score_resized`` given the images resized to K tokens.
    """

    batch: Sequence[Example]
    tokens: VisualTokens
    score_kept: Callable[[Tensor, Tensor, Tensor | None], Scores]
    score_resized: Callable[[int], Scores]

    @torch.no_grad()
    def score(self, case: Case) -> Scores:
        """Score the answers to all questions of the batch in one case."""
        tokens = self.tokens
        count = tokens.count
        budget = case.budget.tokens(count)
        if case.state is not None:
            refined = refine(materialize(case.state, budget), tokens)
            places = place_rows(case.state.positions, refined, count)
            return self.score_kept(refined.indices, refined.features, places)
        if case.name == "resized":
            return self.score_resized(budget)
        if case.name == "full":
            selection = torch.arange(count).expand(len(self.batch), -1)
        else:
            rows = []
            for example in self.batch:
                # Fixed for each question.
                rng = random.Random(f"{example.image_id} {example.question}")
                evidence = example.evidence if case.name == "oracle" else ()
                rows.append(keep_first(rng, evidence, budget, count))
            selection = torch.tensor(rows)
        return self.score_kept(
            selection, gather_rows(tokens.features, selection), selection
        )


def place_rows(
    positions: Positions, refined: RefinedTokens, count: int
) -> Tensor | None:
    """Places ``(M, K)`` of rows in images of N = ``count`` tokens; None for one after the other."""
    if positions == "packed":
        return None
    if positions == "true":
        return refined.places(count)
    budget = refined.features.shape[1]
    return (torch.arange(budget) * count // budget).expand(len(refined.features), -1)


class Yardstick(ABC):
    """A checkpoint with its questions, loaded at first use.

    ``key`` is the model's name in commands, ``search_result`` the state that a search found on it.
    ``usual_tokens`` is N of a usual image, and ``available`` are the inputs that a
    server of this backbone gives to policies. ``equal_policies`` keep the tokens of another base
    policy on this model, and have no row. ``images_per_batch`` images may be encoded together.
    ``has_one_axis`` says that positions have one, so that kept tokens may be packed.
    """

    name: ClassVar[str]
    key: ClassVar[Model]
    search_result: ClassVar[str]
    budgets: ClassVar[Sequence[Budget]]
    usual_tokens: ClassVar[int]
    available: ClassVar[frozenset[Need]]
    equal_policies: ClassVar[Collection[str]] = ()
    images_per_batch: ClassVar[int] = 1
    has_one_axis: ClassVar[bool] = False

    def __init__(self, checkpoint: Path | None = None) -> None:
        """Without a checkpoint, the committed one."""
        self._checkpoint = checkpoint or CHECKPOINTS[self.key]

    @cached_property
    def model(self) -> str:
        """Name and digest of the weights, as in the evidence of shipped states."""
        return f"{self.name} {weights_digest(self._checkpoint)}"

    @property
    @abstractmethod
    def network(self) -> Any:
        """The model of transformers, in bfloat16."""

    @property
    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The language model's."""

    @abstractmethod
    def encode(self, batch: Sequence[Example]) -> EncodedBatch:
        """Encode the images of a batch of questions, with all inputs of policies."""

    def batches(self, examples: Sequence[Example]) -> Iterator[list[Example]]:
        """The questions about a few images at a time; the same however many there are."""
        size = self.images_per_batch
        for _, group in groupby(examples, key=lambda example: example.image_id // size):
            yield list(group)

    def token_ids(self, text: str) -> list[int]:
        """Ids of a text without special tokens of its own."""
        return self.tokenizer(text, add_special_tokens=False).input_ids

    @staticmethod
    def pad_ids(rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Ids (M, L) padded on the right with the last of each row, and which are no padding."""
        longest = max(map(len, rows))
        padded = torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows])
        return padded, torch.arange(longest) < torch.tensor(
            [[len(row)] for row in rows]
        )

    def embed_content_words(self, batch: Sequence[Example]) -> Words:
        """The content words of the questions, in the language model's input embeddings."""
        words = [split_content_words(example.question) for example in batch]
        ids, used = self.pad_ids(
            [[token for word in row for token in self.token_ids(word)] for row in words]
        )
        return Words(self.network.get_input_embeddings()(ids), used)

    @torch.no_grad()
    def score_rows(
        self,
        examples: Sequence[Example],
        rows: Tensor,
        arrange: Callable[[int, int], Mapping[str, object]] = lambda lead, tail: {},
    ) -> Scores:
        """Score the reference answers of M questions, given image rows (M, K, D) in order.

        ``arrange`` makes the other arguments of the language model of the numbers of text tokens
        before and behind the image. Padding is on the right, where the causal mask hides it from
        every real token.
        """
        lead_text, _, template = PROMPT[self.key]
        questions = [
            self.token_ids(template.format(question=e.question)) for e in examples
        ]
        end = self.tokenizer.eos_token_id
        answers = [[*self.token_ids(f" {example.answer}"), end] for example in examples]
        pairs = zip(questions, answers, strict=True)
        texts, _ = self.pad_ids([question + answer[:-1] for question, answer in pairs])
        embed = self.network.get_input_embeddings()
        lead = embed(torch.tensor(self.token_ids(lead_text)))
        embeds = (
            lead.expand(len(examples), -1, -1),
            rows.to(lead.dtype),
            embed(texts),
        )
        hidden = self.network.model.language_model(
            inputs_embeds=torch.cat(embeds, 1),
            use_cache=False,
            **arrange(len(lead), texts.shape[1]),
        ).last_hidden_state
        logits = (
            self.network.lm_head(hidden[:, -texts.shape[1] :]).float().log_softmax(-1)
        )
        correct = []
        logprob = []
        for row, question, answer in zip(logits, questions, answers, strict=True):
            predicted = row[len(question) - 1 : len(question) - 1 + len(answer)]
            expected = torch.tensor(answer)
            correct.append(bool((predicted.argmax(-1) == expected).all()))
            logprob.append(predicted.gather(1, expected[:, None]).sum())
        return Scores(torch.tensor(correct), torch.stack(logprob), rows.shape[1])


@contextmanager
def record_outputs(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Record the last output of each named submodule while the context is open."""
    outputs: dict[str, Any] = {}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda *call, name=name: outputs.update({name: call[-1]})
        )
        for name in names
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
