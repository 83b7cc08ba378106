"""`python -m benchmarks.accuracy`: print the published tables with every figure recomputed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.evaluation.scoring import MMBENCH, Aggregates, aggregate
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.report import Table

_PATH = Path(__file__).with_name("published.json")

_COLUMNS = (
    "method", "K", "Acc. printed", "Acc.", "Rel. printed", "ratio of means", "mean of ratios",
    "follows", "Acc. w/o MMB", "ratio of means w/o MMB", "mean of ratios w/o MMB",
)  # fmt: skip

_Follows = Literal["both", "ratio of means", "mean of ratios", "neither"]


class _Row(FrozenModel):
    """One printed row."""

    method: str
    tokens: int
    scores: tuple[float, ...]
    acc: float
    rel: float
    rel_follows: _Follows
    """The definition that reproduces ``rel``, as :meth:`PublishedTable.definition` finds it."""


class PublishedTable(FrozenModel):
    """A table, or a part of one whose rows share a full model."""

    table: str
    backbone: str
    mme_divisor: float
    decimals: int
    """Decimals of the printed Acc."""
    benchmarks: tuple[str, ...]
    rows: tuple[_Row, ...]

    @property
    def full(self) -> _Row:
        """The row of the unpruned model."""
        return next(row for row in self.rows if row.method == "full")

    def recompute(self, row: _Row, without: Collection[str] = ()) -> Aggregates:
        """The figures of a row, by its printed scores."""
        scores, full = (
            dict(zip(self.benchmarks, printed.scores, strict=True)) for printed in (row, self.full)
        )
        return aggregate(scores, full, self.mme_divisor, without)

    def acc_reproduces(self, row: _Row) -> bool:
        """Whether the recomputed Acc. rounds to the printed one."""
        return _rounds_to(self.recompute(row).acc, row.acc, self.decimals)

    def definition(self, row: _Row) -> _Follows:
        """The definitions of Rel. that give the printed value.

        The ratio of means is tried with unrounded figures, with printed ones, and with an unrounded
        one over the printed one of the full model, as a table may have been computed in any of
        these ways.
        """
        figures, full = self.recompute(row), self.full.acc
        ratios = (figures.ratio_of_means, 100 * row.acc / full, 100 * figures.acc / full)
        is_ratio = any(_rounds_to(value, row.rel, 1) for value in ratios)
        is_mean = _rounds_to(figures.mean_of_ratios, row.rel, 1)
        if is_ratio:
            return "both" if is_mean else "ratio of means"
        return "mean of ratios" if is_mean else "neither"


class _Published(FrozenModel):
    """The data file."""

    source: str
    note: str
    tables: tuple[PublishedTable, ...]


def read_published() -> tuple[PublishedTable, ...]:
    """The published tables as printed."""
    return _Published.model_validate_json(_PATH.read_text()).tables


def _rounds_to(value: float | None, printed: float, decimals: int) -> bool:
    """Whether a value is within half a unit of the last printed digit, ties included."""
    return value is not None and bool(abs(value - printed) <= 0.5 * 10**-decimals + 1e-9)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a printed figure follows none of the definitions, else 0."""
    parser = CommandParser(
        prog="python -m benchmarks.accuracy",
        description="Print the published tables with every figure recomputed.",
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of Markdown")
    options = parser.parse_args(arguments)
    tables = read_published()
    print(_as_json(tables) if options.json else "\n".join(_as_markdown(tables)))
    reproduced = (
        table.acc_reproduces(row) and table.definition(row) != "neither"
        for table in tables
        for row in table.rows
    )
    return 0 if all(reproduced) else 1


def _as_markdown(tables: Sequence[PublishedTable]) -> Iterator[str]:
    """Each published table, and a summary."""
    counts, reproduced = Counter[str](), 0
    for table in tables:
        yield f"\n{table.table}, {table.backbone}\n"
        cells = []
        for row in table.rows:
            figures, without = table.recompute(row), table.recompute(row, MMBENCH)
            follows = table.definition(row)
            counts[follows] += 1
            reproduced += table.acc_reproduces(row)
            cells.append((
                row.method, str(row.tokens), f"{row.acc:.{table.decimals}f}", f"{figures.acc:.3f}",
                f"{row.rel:.1f}", f"{figures.ratio_of_means:.2f}", f"{figures.mean_of_ratios:.2f}",
                follows, f"{without.acc:.2f}", f"{without.ratio_of_means:.2f}",
                f"{without.mean_of_ratios:.2f}",
            ))  # fmt: skip
        yield Table("", _COLUMNS, cells).markdown()
    kinds = ", ".join(f"{kind}: {count}" for kind, count in counts.most_common())
    total = counts.total()
    yield f"\nAcc. reproduces in {reproduced} of {total} rows. Printed Rel. follows {kinds}."


def _as_json(tables: Sequence[PublishedTable]) -> str:
    """All rows with their printed and recomputed figures."""
    records = []
    for table in tables:
        for row in table.rows:
            figures = table.recompute(row).model_dump()
            without = table.recompute(row, MMBENCH).model_dump()
            records.append({
                "table": table.table,
                "backbone": table.backbone,
                **row.model_dump(),
                "acc_computed": figures.pop("acc"),
                **figures,
                **{f"{name}_without_mmbench": value for name, value in without.items()},
            })  # fmt: skip
    return json.dumps(records, indent=1)


if __name__ == "__main__":
    sys.exit(main())
