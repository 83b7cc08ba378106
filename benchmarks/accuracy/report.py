"""The report of an evaluation: a verdict and one row for each case.

Knows nothing about how it is shown. A row's figures are points of per cent, but points for MME and
natural logarithms for log-probabilities; of differences, more is better for the row.
"""

from __future__ import annotations

from benchmarks.accuracy.records import Case, Opened
from offline_search.ledger.records import IntervalEstimate
from offline_search.settings import FrozenModel


class Gaps(FrozenModel):
    """A case less another one, on the same questions, with 95 % intervals."""

    acc: IntervalEstimate | None
    accuracy: IntervalEstimate | None
    mme: IntervalEstimate | None
    logprob: IntervalEstimate | None


class Aggregates(FrozenModel):
    """*Acc.*, and *Rel.* by both definitions; None where it would divide by nothing."""

    acc: float
    ratio_of_means: float | None
    mean_of_ratios: float | None


class Row(FrozenModel):
    """One case that was measured completely."""

    case: Case
    benchmarks: dict[str, float]
    all: Aggregates
    without_mmbench: Aggregates | None
    accuracy: IntervalEstimate | None
    accuracy_plus: float | None
    prompt_tokens: float | None
    to_full: Gaps | None
    to_base: Gaps | None


class Report(FrozenModel):
    """An evaluation; ``reasons`` say why it is not valid."""

    opened: Opened
    questions: int
    images: int
    reasons: tuple[str, ...]
    rows: tuple[Row, ...]
    refused: tuple[Case, ...]

    @property
    def valid(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.reasons

    def of(self, name: str) -> Row | None:
        """The row of a case, if it was measured."""
        return next((row for row in self.rows if row.case.name == name), None)
