"""mini-LLaVA as a yardstick: a fixed grid of 144 tokens, whose resize control pools them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import ClassVar, get_args

import torch

from benchmarks.accuracy.yardsticks.cases import FULL, ORACLE, RANDOM, RESIZED, Budget, Case
from benchmarks.accuracy.yardsticks.yardstick import CaseScores
from benchmarks.minillava.reader import Reader
from benchmarks.minillava.selections import (
    EQUAL_POLICIES,
    Selection,
    keep_all,
    keep_evidence,
    keep_random,
    pool_cells,
)
from benchmarks.minillava.split import (
    CHECKPOINT,
    Example,
    Split,
    draw_examples,
    weights_digest,
)
from benchmarks.minillava.wordings import CATEGORIES
from vllm_autoprune.ops.rowwise import gather_rows
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.tokens import Need, VisualTokens

TOKENS = 144
_CONTROLS: Mapping[str, Selection] = {
    FULL: keep_all,
    RESIZED: pool_cells,
    RANDOM: keep_random,
    ORACLE: keep_evidence,
}


class MiniLlava:
    """The committed checkpoint on scenes, with all inputs that any policy reads."""

    name: ClassVar[str] = "mini-LLaVA"
    default: ClassVar[str] = "minillava"
    budgets: ClassVar[Sequence[Budget]] = [
        Budget(f"K = {k}", Fraction(k, TOKENS)) for k in (72, 36, 18, 9)
    ]
    eighth: ClassVar[str] = "K = 18"
    usual_tokens: ClassVar[int] = TOKENS
    available: ClassVar[frozenset[Need]] = frozenset(get_args(Need)) - {"merger_input"}
    equal_policies: ClassVar[Collection[str]] = EQUAL_POLICIES
    categories: ClassVar[Mapping[str, Sequence[str]]] = CATEGORIES
    images_per_batch: ClassVar[int] = 4

    def __init__(self, checkpoint: Path = CHECKPOINT) -> None:
        self._checkpoint = checkpoint

    @cached_property
    def model(self) -> str:
        """Name and digest of the weights, as in the evidence of shipped states."""
        return f"{self.name} {weights_digest(self._checkpoint)}"

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self._checkpoint)

    def draw(self, split: Split, images: int) -> Sequence[Example]:
        """Questions about the first scenes of a split."""
        return draw_examples(split, images)

    def encode(self, batch: Sequence[Example]) -> EncodedScenes:
        """All inputs of policies for the questions."""
        return EncodedScenes(self._reader, batch, self._reader.encode(batch))


class EncodedScenes:
    """Questions about a few scenes."""

    def __init__(self, reader: Reader, batch: Sequence[Example], tokens: VisualTokens) -> None:
        self._reader, self._batch = reader, batch
        self.tokens = tokens

    @torch.no_grad()
    def score(self, case: Case) -> CaseScores:
        """Score the answers given the rows that the case keeps."""
        budget = case.budget.tokens(self.tokens.count)
        if case.kept is not None:
            rows = gather_rows(self.tokens.features, case.kept)
        elif case.control is not None:
            rows = _CONTROLS[case.control](self._batch, self.tokens, budget)
        else:
            assert case.state is not None
            rows = refine(materialize(case.state, budget), self.tokens).features
        return CaseScores(self._reader.score_answers(self._batch, rows), rows.shape[1])
