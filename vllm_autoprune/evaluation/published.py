"""The published rows with *Acc.* and *Rel.*, recomputed by each definition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.scoring import (
    MMBENCH,
    Scores,
    accuracy,
    mean_of_ratios,
    ratio_of_means,
)

_PATH = Path(__file__).with_name("published.json")
_FULL = "full"
_REL_DECIMALS = 1

_Follows = Literal["both", "ratio of means", "mean of ratios", "neither"]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Row(_Data):
    """One printed row."""

    method: str
    tokens: int
    scores: tuple[float, ...]
    acc: float
    rel: float
    rel_follows: _Follows
    """The definition that reproduces ``rel``, as :func:`_matching_definition` finds it."""


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
        return next(row for row in self.rows if row.method == _FULL)

    def scores(self, row: Row) -> Scores:
        """Scores by benchmark."""
        return dict(zip(self.benchmarks, row.scores, strict=True))


class _Published(_Data):
    """The data file ``published.json``."""

    source: str
    note: str
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class Audit:
    """One row with its recomputed figures."""

    table: Table
    row: Row
    acc: float
    ratio_of_means: float
    mean_of_ratios: float
    acc_without_mmbench: float
    ratio_of_means_without_mmbench: float
    mean_of_ratios_without_mmbench: float
    follows: _Follows

    @property
    def acc_reproduces(self) -> bool:
        """Whether the recomputed Acc. rounds to the printed one."""
        return _rounds_to(self.acc, self.row.acc, self.table.decimals)


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


def audit(source: _Published) -> Iterator[Audit]:
    """Recompute every row of every table."""
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
                follows=_matching_definition(table, row),
            )


def _matching_definition(table: Table, row: Row) -> _Follows:
    """The definitions of Rel. that give the printed value.

    The ratio of means is tried with unrounded figures, with printed ones, and with an unrounded one
    over the printed one of the full model, as a table may have been computed in any of these ways.
    """
    scores, full, divisor = table.scores(row), table.scores(table.full), table.mme_divisor
    acc = accuracy(scores, divisor)
    ratios = (
        ratio_of_means(scores, full, divisor),
        100 * row.acc / table.full.acc,
        100 * acc / table.full.acc,
    )
    is_ratio = any(_rounds_to(value, row.rel, _REL_DECIMALS) for value in ratios)
    is_mean = _rounds_to(mean_of_ratios(scores, full), row.rel, _REL_DECIMALS)
    match is_ratio, is_mean:
        case True, True:
            return "both"
        case True, False:
            return "ratio of means"
        case False, True:
            return "mean of ratios"
    return "neither"


def _rounds_to(value: float, printed: float, decimals: int) -> bool:
    """Whether a value is within half a unit of the last printed digit, ties included."""
    return bool(abs(value - printed) <= 0.5 * 10**-decimals + 1e-9)
