"""The published rows with *Acc.* and *Rel.*, recomputed by each definition."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.scoring import Aggregates, Scores, aggregate

_PATH = Path(__file__).with_name("published.json")
_REL_DECIMALS = 1

Follows = Literal["both", "ratio of means", "mean of ratios", "neither"]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Row(_Data):
    """One printed row."""

    method: str
    tokens: int
    scores: tuple[float, ...]
    acc: float
    rel: float
    rel_follows: Follows
    """The definition that reproduces ``rel``, as :meth:`Table.definition` finds it."""


class Table(_Data):
    """A table, or a part of one whose rows share a full model."""

    table: str
    backbone: str
    mme_divisor: float
    decimals: int
    """Decimals of the printed Acc."""
    benchmarks: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def full(self) -> Row:
        """The row of the unpruned model."""
        return next(row for row in self.rows if row.method == "full")

    def scores(self, row: Row) -> Scores:
        """Scores by benchmark."""
        return dict(zip(self.benchmarks, row.scores, strict=True))

    def recompute(self, row: Row, without: Collection[str] = ()) -> Aggregates:
        """The figures of a row, by its printed scores."""
        full = self.scores(self.full)
        return aggregate(self.scores(row), full, self.mme_divisor, without)

    def acc_reproduces(self, row: Row) -> bool:
        """Whether the recomputed Acc. rounds to the printed one."""
        return _rounds_to(self.recompute(row).acc, row.acc, self.decimals)

    def definition(self, row: Row) -> Follows:
        """The definitions of Rel. that give the printed value.

        The ratio of means is tried with unrounded figures, with printed ones, and with an unrounded
        one over the printed one of the full model, as a table may have been computed in any of
        these ways.
        """
        figures, full = self.recompute(row), self.full.acc
        ratios = (figures.ratio_of_means, 100 * row.acc / full, 100 * figures.acc / full)
        is_ratio = any(_rounds_to(value, row.rel, _REL_DECIMALS) for value in ratios)
        is_mean = _rounds_to(figures.mean_of_ratios, row.rel, _REL_DECIMALS)
        if is_ratio and is_mean:
            return "both"
        if is_ratio:
            return "ratio of means"
        return "mean of ratios" if is_mean else "neither"


class _Published(_Data):
    """The data file ``published.json``."""

    source: str
    note: str
    tables: tuple[Table, ...]


def read_published() -> _Published:
    """Read the published rows as printed."""
    return _Published.model_validate_json(_PATH.read_text())


def mme_divisor(backbone: str) -> float:
    """The divisor of MME for a backbone of the published tables; raises :class:`ConfigError`."""
    divisors = {table.backbone: table.mme_divisor for table in read_published().tables}
    if backbone not in divisors:
        fix = f"use {', '.join(divisors)}"
        raise ConfigError("eval", [Problem(f"--backbone {backbone}", "is in no table", fix)])
    return divisors[backbone]


def _rounds_to(value: float | None, printed: float, decimals: int) -> bool:
    """Whether a value is within half a unit of the last printed digit, ties included."""
    return value is not None and bool(abs(value - printed) <= 0.5 * 10**-decimals + 1e-9)
