"""A yardstick: a small trained model with questions, scored with any selection of tokens."""

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
    Example,
    keep_first,
    split_prompt,
    weights_digest,
)
from benchmarks.yardsticks.questions import Model
from vllm_autoprune.ops.rowwise import gather_rows
from vllm_autoprune.serving.api.instruction import split_content_words
from vllm_autoprune.tpdsl.base_policy import RefinedTokens
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import (
    Grid,
    Instruction,
    MergerInput,
    Need,
    Positions,
    VisualTokens,
    Words,
)


@dataclass(frozen=True)
class Budget:
    """K as a share of N, at most ``limit``, and its name in tables."""

    label: str
    share: Fraction
    limit: int | None = None

    def tokens(self, count: int) -> int:
        """K of an image of ``count`` = N tokens, rounded down."""
        tokens = max(1, int(self.share * count))
        return tokens if self.limit is None else min(tokens, self.limit)


ALL_TOKENS = Budget("all", Fraction(1))


@dataclass(frozen=True)
class Case:
    """One way to choose tokens, at one budget: a state or, if ``state`` is None, a control.

    The name of a control is ``full`` (all tokens), ``resized`` (the image resized to K), ``random``
    (K random tokens) or ``oracle`` (the tokens that hold the answer, then random ones). ``base``
    names the case with which this one is compared: the base policy that its state refines or, if it
    ranks tokens before the patch merger, the same state with tokens ranked after it.
    """

    name: str
    budget: Budget
    state: PruningState | None = None
    base: str = ""


@dataclass(frozen=True)
class Scores:
    """Scores of the reference answers to M questions, each about an image of K tokens.

    correct (M,) bool: whether greedy decoding gives exactly the reference answer and then stops;
    logprob (M,) float32: natural logarithm of the probability of the answer and its end token.
    """

    correct: Tensor
    logprob: Tensor
    tokens: int


@dataclass(frozen=True)
class EncodedBatch:
    """Questions about a few images, and the inputs of policies, with one row for each question.

    ``score_kept`` scores the answers for raster tokens ``(M, P)`` with feature rows ``(M, K, D)``;
    the first P rows belong to these tokens. Its third argument has the places ``(M, K)`` of the
    rows in the whole image, or is None if they are packed. ``score_resized`` scores the answers for
    the images resized to K tokens.
    """

    batch: Sequence[Example]
    tokens: VisualTokens
    score_kept: Callable[[Tensor, Tensor, Tensor | None], Scores]
    score_resized: Callable[[int], Scores]

    @torch.no_grad()
    def score(self, case: Case) -> Scores:
        """Score the answers to all questions of the batch with the tokens of ``case``."""
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
                # The seed depends only on the question, so that its random tokens are always the
                # same.
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
    """Places ``(M, K)`` of rows in images of N = ``count`` tokens; None if rows are packed."""
    if positions == "packed":
        return None
    if positions == "true":
        return refined.places(count)
    budget = refined.features.shape[1]
    return (torch.arange(budget) * count // budget).expand(len(refined.features), -1)


def place_on_line(
    places: Tensor, count: int, lead: int, tail: int
) -> dict[str, Tensor]:
    """Arguments of a language model whose positions have one axis, for rows at their places.

    There are ``lead`` tokens of text, rows at places ``(M, K)`` of an image of N = ``count``
    tokens, and ``tail`` tokens of text, which have the positions that they have after all N.
    """
    text = torch.arange(lead)
    tail_positions = torch.arange(tail) + lead + count
    rows = len(places)
    parts = (text.expand(rows, -1), lead + places, tail_positions.expand(rows, -1))
    positions = torch.cat(parts, 1)
    # Without a mask, gaps between positions are taken for boundaries of packed sequences.
    return {"position_ids": positions, "attention_mask": torch.ones_like(positions)}


@dataclass(frozen=True)
class EncodedImage:
    """An image after the vision tower.

    rows (N, D) enter the first layer of the language model. attention (N,) is the attention to a
    token from all patches in the tower's last layer. encoder (N, Dv) is the mean of a token's
    patches before the merger. merger_norms (N, 2) are the sum of absolute values and the Euclidean
    norm of the first merger's input, as means over a token's patches, or of its patches in one row.
    """

    grid: Grid
    rows: Tensor
    attention: Tensor
    encoder: Tensor
    merger_norms: Tensor


class Yardstick(ABC):
    """A small model with its questions; the checkpoint is loaded at first use.

    ``key`` is the model's name in commands, ``search_result`` the state that a search found on it,
    empty if no search has seen the model.
    ``usual_tokens`` is N of a usual image. ``available`` has the inputs that a server of this
    backbone gives to policies. ``equal_policies`` are base policies that keep the same tokens as
    another one on this model, so they get no row. At most ``images_per_batch`` images are encoded
    together. ``has_one_axis`` says whether positions have a single axis, so that kept tokens may be
    packed.
    """

    name: ClassVar[str]
    key: ClassVar[Model]
    search_result: ClassVar[str] = ""
    budgets: ClassVar[Sequence[Budget]]
    usual_tokens: ClassVar[int]
    available: ClassVar[frozenset[Need]]
    equal_policies: ClassVar[Collection[str]] = ()
    images_per_batch: ClassVar[int] = 1
    has_one_axis: ClassVar[bool] = False

    def __init__(self, checkpoint: Path | None = None) -> None:
        """``checkpoint``: folder of the model; None is the committed one."""
        self._checkpoint = checkpoint or CHECKPOINTS[self.key]

    @cached_property
    def model(self) -> str:
        """Name of the model and digest of its weights, as in the evidence of shipped states."""
        return f"{self.name} {weights_digest(self._checkpoint)}"

    @property
    @abstractmethod
    def network(self) -> Any:
        """The transformers model, in bfloat16."""

    @property
    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the language model."""

    @abstractmethod
    def encode(self, batch: Sequence[Example]) -> EncodedBatch:
        """Encode the images of a batch of questions, and all inputs of policies."""

    def batches(self, examples: Sequence[Example]) -> Iterator[list[Example]]:
        """Batches of questions about a few images; more examples change no earlier batch."""
        size = self.images_per_batch
        for _, group in groupby(examples, key=lambda example: example.image_id // size):
            yield list(group)

    def token_ids(self, text: str) -> list[int]:
        """Token ids of a text, to which no special tokens are added."""
        return self.tokenizer(text, add_special_tokens=False).input_ids

    @staticmethod
    def pad_ids(rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Ids (M, L), padded on the right with the last id of a row, and a mask (false there)."""
        longest = max(map(len, rows))
        padded = torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows])
        return padded, torch.arange(longest) < torch.tensor(
            [[len(row)] for row in rows]
        )

    def embed_content_words(self, batch: Sequence[Example]) -> Words:
        """The content words of the questions, as input embeddings of the language model."""
        words = [split_content_words(example.question) for example in batch]
        ids, used = self.pad_ids(
            [[token for word in row for token in self.token_ids(word)] for row in words]
        )
        return Words(self.network.get_input_embeddings()(ids), used)

    def describe_image(
        self, batch: Sequence[Example], image: EncodedImage
    ) -> VisualTokens:
        """Inputs of policies in a server, for M questions about one image.

        Relevance is measured in the language model's input embeddings, against the mean embedding
        of the question. A state's ``rank_at`` decides whether tokens are ranked after or before the
        merger.
        """
        count = len(batch)
        grid = image.grid
        features = image.rows.expand(count, -1, -1)
        embed = self.network.get_input_embeddings()
        questions = [torch.tensor(self.token_ids(e.question)) for e in batch]
        text = torch.stack([embed(ids).float().mean(0) for ids in questions])
        segments = torch.ones(count, 1, dtype=torch.bool)
        return VisualTokens(
            features,
            grid,
            cls_attention=image.attention.expand(count, -1),
            instruction=Instruction(features, text[:, None], segments, sign=1),
            known_cosine=lambda: VisualTokens(image.rows[None], grid).cosine.expand(
                count, -1, -1
            ),
            encoder=image.encoder.expand(count, -1, -1),
            words=self.embed_content_words(batch),
            merger_input=MergerInput(
                image.merger_norms.expand(count, -1, -1),
                lambda: VisualTokens(image.encoder[None], grid).cosine.expand(
                    count, -1, -1
                ),
            ),
        )

    @torch.no_grad()
    def score_rows(
        self,
        examples: Sequence[Example],
        rows: Tensor,
        arrange: Callable[[int, int], Mapping[str, object]] = lambda lead, tail: {},
    ) -> Scores:
        """Score the reference answers of M questions, given image rows (M, K, D) in order.

        ``arrange`` returns further arguments of the language model, from the numbers of text tokens
        before and after the image. Padding is on the right, where the causal mask hides it from all
        real tokens.
        """
        lead_text, template = split_prompt(self.key)
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
