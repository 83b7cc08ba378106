"""mini-Qwen3-VL as a yardstick: images of any size, which the processor itself can resize."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch

from benchmarks.accuracy.yardsticks.cases import FULL, ORACLE, RANDOM, RESIZED, Budget, Case
from benchmarks.accuracy.yardsticks.yardstick import CaseScores
from benchmarks.minillava.split import Example, Split
from benchmarks.miniqwen.evaluate import DIVISORS, keep_evidence, keep_random
from benchmarks.miniqwen.reader import EncodedImage, Reader
from benchmarks.miniqwen.split import CHECKPOINT, draw_examples, weights_digest
from benchmarks.miniqwen.wordings import CATEGORIES
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.tokens import Need, VisualTokens


class MiniQwen:
    """The committed checkpoint on scenes and pages, with the inputs that Qwen models have."""

    name: ClassVar[str] = "mini-Qwen3-VL"
    default: ClassVar[str] = "miniqwen"
    budgets: ClassVar[Sequence[Budget]] = [
        Budget(f"K = N/{divisor}", Fraction(1, divisor)) for divisor in DIVISORS
    ]
    eighth: ClassVar[str] = "K = N/8"
    usual_tokens: ClassVar[int] = 72
    available: ClassVar[frozenset[Need]] = frozenset(
        ("cls_attention", "instruction", "encoder", "merger_input", "words")
    )
    equal_policies: ClassVar[Collection[str]] = ()
    categories: ClassVar[Mapping[str, Sequence[str]]] = CATEGORIES
    images_per_batch: ClassVar[int] = 1

    def __init__(self, checkpoint: Path = CHECKPOINT) -> None:
        self._checkpoint = checkpoint

    @cached_property
    def model(self) -> str:
        """Name and digest of the weights."""
        return f"{self.name} {weights_digest(self._checkpoint)}"

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self._checkpoint)

    def draw(self, split: Split, images: int) -> Sequence[Example]:
        """Questions about the first images of a split, scenes and pages in turn."""
        return draw_examples(split, images)

    def encode(self, batch: Sequence[Example]) -> EncodedQuestions:
        """All inputs of policies for the questions about one image."""
        image = self._reader.encode(batch[0].image)
        return EncodedQuestions(
            self._reader, batch, image, self._reader.policy_inputs(batch, image)
        )


class EncodedQuestions:
    """Questions about one image."""

    def __init__(
        self, reader: Reader, batch: Sequence[Example], image: EncodedImage, tokens: VisualTokens
    ) -> None:
        self._reader, self._batch, self._image = reader, batch, image
        self.tokens = tokens

    @torch.no_grad()
    def score(self, case: Case) -> CaseScores:
        """Score the answers given the tokens that the case keeps, or the resized image."""
        count = self._image.size.tokens
        budget = case.budget.tokens(count)
        if case.state is not None:
            refined = refine(materialize(case.state, budget), self.tokens)
            answers = self._reader.score_answers(
                self._batch, self._image, refined.indices, refined.features
            )
            return CaseScores(answers, budget)
        if case.kept is not None:
            kept = case.kept
            return CaseScores(self._reader.score_answers(self._batch, self._image, kept), budget)
        if case.control in (FULL, RESIZED):
            image = self._image
            if case.control == RESIZED:
                image = self._reader.encode(self._batch[0].image, budget)
            return CaseScores(self._reader.score_answers(self._batch, image), image.size.tokens)
        keep = {RANDOM: keep_random, ORACLE: keep_evidence}[case.control or RANDOM]
        kept = keep(self._batch, count, budget)
        return CaseScores(self._reader.score_answers(self._batch, self._image, kept), budget)
