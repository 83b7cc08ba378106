"""The published rows that print *Acc.* and *Rel.*, and what each definition makes of them.

Knows nothing about our own measurements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from benchmarks.accuracy.aggregate import (
    MMBENCH,
    Scores,
    accuracy,
    mean_of_ratios,
    ratio_of_means,
)
from vllm_autoprune.errors import ConfigError, Problem

PATH = Path(__file__).with_name("published.json")
FULL = "full"
REL_DECIMALS = 1

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
    """Which definition reproduces ``rel``; a test holds it to :func:`follows`."""


class Table(_Data):
    """Rows that share a full model."""

    table: str
    backbone: str
    mme_divisor: float
    decimals: int
    """Of the printed Acc."""
    benchmarks: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def full(self) -> Row:
        """The unpruned model."""
        return next(row for row in self.rows if row.method == FULL)

    def scores(self, row: Row) -> Scores:
        """By benchmark."""
        return dict(zip(self.benchmarks, row.scores, strict=True))


class Published(_Data):
    """The data file."""

    source: str
    note: str
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class Audit:
    """One row, computed anew."""

    table: Table
    row: Row
    acc: float
    ratio_of_means: float
    mean_of_ratios: float
    acc_without_mmbench: float
    ratio_of_means_without_mmbench: float
    mean_of_ratios_without_mmbench: float
    follows: Follows

    @property
    def acc_reproduces(self) -> bool:
        """Whether Acc. rounds to what is printed."""
        return _rounds_to(self.acc, self.row.acc, self.table.decimals)


def published() -> Published:
    """The rows as printed."""
    return Published.model_validate_json(PATH.read_text())


def mme_divisor(backbone: str) -> float:
    """Points of MME to per cent on a backbone of the tables; raises :class:`ConfigError`."""
    known = {table.backbone: table.mme_divisor for table in published().tables}
    if backbone not in known:
        fix = f"use {', '.join(known)}"
        raise ConfigError("eval", [Problem(f"--backbone {backbone}", "is in no table", fix)])
    return known[backbone]


def audit(source: Published) -> Iterator[Audit]:
    """Every row of every table."""
    for table in source.tables:
        full = table.scores(table.full)
        for row in table.rows:
            scores, divisor = table.scores(row), table.mme_divisor
            yield Audit(
                table=table,
                row=row,
                acc=accuracy(scores, divisor),
                ratio_of_means=ratio_of_means(scores, full, divisor),
                mean_of_ratios=mean_of_ratios(scores, full),
                acc_without_mmbench=accuracy(scores, divisor, MMBENCH),
                ratio_of_means_without_mmbench=ratio_of_means(scores, full, divisor, MMBENCH),
                mean_of_ratios_without_mmbench=mean_of_ratios(scores, full, MMBENCH),
                follows=follows(table, row),
            )


def follows(table: Table, row: Row) -> Follows:
    """Which definitions give the printed Rel.

    A ratio of means is taken of unrounded figures, of printed ones, and of an unrounded one over
    the printed full one: a printed table can have been made in any of these ways.
    """
    scores, full, divisor = table.scores(row), table.scores(table.full), table.mme_divisor
    acc = accuracy(scores, divisor)
    of_means = (
        ratio_of_means(scores, full, divisor),
        100 * row.acc / table.full.acc,
        100 * acc / table.full.acc,
    )
    first = any(_rounds_to(value, row.rel, REL_DECIMALS) for value in of_means)
    second = _rounds_to(mean_of_ratios(scores, full), row.rel, REL_DECIMALS)
    match first, second:
        case True, True:
            return "both"
        case True, False:
            return "ratio of means"
        case False, True:
            return "mean of ratios"
    return "neither"


def _rounds_to(value: float, printed: float, decimals: int) -> bool:
    """Half a unit of the last printed place; ties may have been rounded either way."""
    return abs(value - printed) <= 0.5 * 10**-decimals + 1e-9
