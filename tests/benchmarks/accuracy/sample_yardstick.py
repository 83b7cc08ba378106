"""A yardstick without a model, whose answers follow from the case alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar

import torch

from benchmarks.yardsticks.examples import Example, Split
from benchmarks.yardsticks.yardstick import AnswerScores, Budget, Case, CaseScores
from vllm_autoprune.tpdsl.tokens import Grid, Need, VisualTokens

QUARTER = Budget("K = 4", Fraction(1, 4))


@dataclass
class SampleYardstick:
    """Of two questions about an image, the first is right in every case but ``wrong``."""

    name: ClassVar[str] = "sample"
    default: ClassVar[str] = "instruction-free"
    budgets: ClassVar[Sequence[Budget]] = [QUARTER]
    eighth: ClassVar[str] = "K = 4"
    usual_tokens: ClassVar[int] = 16
    available: ClassVar[frozenset[Need]] = frozenset(("cls_attention",))
    equal_policies: ClassVar[Collection[str]] = ()
    categories: ClassVar[Mapping[str, Sequence[str]]] = {"first": ("a",), "second": ("b",)}
    images_per_batch: ClassVar[int] = 1
    model: str = "sample 1"
    wrong: tuple[str, ...] = ()
    scored: list[str] = field(default_factory=list)

    def draw(self, split: Split, images: int) -> Sequence[Example]:
        """Two questions about each image."""
        image = torch.zeros(3, 2, 2, dtype=torch.uint8)
        return [
            Example(number, image, f"{kind} {number}?", "yes", kind, None, ())
            for number in range(images)
            for kind in ("a", "b")
        ]

    def encode(self, batch: Sequence[Example]) -> SampleBatch:
        """A batch that records which cases were scored."""
        return SampleBatch(self, VisualTokens(torch.zeros(1, 16, 2), Grid(4, 4)))


@dataclass
class SampleBatch:
    """Two questions about one image."""

    yardstick: SampleYardstick
    tokens: VisualTokens

    def score(self, case: Case) -> CaseScores:
        """The second question is right with all tokens only."""
        self.yardstick.scored.append(case.key)
        right = torch.tensor([case.name not in self.yardstick.wrong, case.name == "full"])
        return CaseScores(AnswerScores(right, torch.zeros(2)), case.budget.tokens(16))
