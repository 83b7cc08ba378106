"""The report of an evaluation: its set-up, one row per case, and reasons against its validity.

Figures are per cent, points for MME, and natural logarithms for log-probabilities. A positive
difference is in favour of the row's own case.
"""

from __future__ import annotations

from offline_search.settings import FrozenModel
from vllm_autoprune.evaluation.records import Case, Setup
from vllm_autoprune.evaluation.statistics import Estimate


class Differences(FrozenModel):
    """A case minus another one on the same questions, with 95 % intervals."""

    acc: Estimate | None
    accuracy: Estimate | None
    mme: Estimate | None
    logprob: Estimate | None


class Aggregates(FrozenModel):
    """*Acc.*, and *Rel.* by both definitions; None in place of a division by zero."""

    acc: float
    ratio_of_means: float | None
    mean_of_ratios: float | None


class Row(FrozenModel):
    """One case that was measured completely."""

    case: Case
    benchmarks: dict[str, float]
    all: Aggregates
    without_mmbench: Aggregates | None
    accuracy: Estimate | None
    accuracy_plus: float | None
    prompt_tokens: float | None
    to_full: Differences | None
    to_base: Differences | None


class Report(FrozenModel):
    """An evaluation; it is valid if there are no ``reasons`` against it."""

    setup: Setup
    questions: int
    images: int
    reasons: tuple[str, ...]
    rows: tuple[Row, ...]
    refused: tuple[Case, ...]

    @property
    def valid(self) -> bool:
        """Whether there is no reason against the report."""
        return not self.reasons

    def row(self, name: str) -> Row | None:
        """The row of a case, if it was measured."""
        return next((row for row in self.rows if row.case.name == name), None)
