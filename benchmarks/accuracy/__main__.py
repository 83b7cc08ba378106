"""``python -m benchmarks.accuracy``: print the published tables with every figure recomputed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from vllm_autoprune.evaluation.scoring import MMBENCH, Aggregates, aggregate
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.report import Table

_COLUMNS = (
    "method", "K", "Acc. printed", "Acc.", "Rel. printed", "ratio of means", "mean of ratios",
    "follows", "Acc. w/o MMB", "ratio of means w/o MMB", "mean of ratios w/o MMB",
)  # fmt: skip


class _Row(FrozenModel):
    """One printed row; ``rel_follows``: the definitions of Rel. that give its value."""

    method: str
    tokens: int
    scores: tuple[float, ...]
    acc: float
    rel: float
    rel_follows: str


class _PublishedTable(FrozenModel):
    """A table, or a part of one whose rows share a full model; ``decimals`` are of its Acc."""

    table: str
    backbone: str
    mme_divisor: float
    decimals: int
    benchmarks: tuple[str, ...]
    rows: tuple[_Row, ...]

    def recompute(self, row: _Row, without: Collection[str] = ()) -> Aggregates:
        """The figures of a row, by its printed scores and those of the unpruned model."""
        scores, full = (
            dict(zip(self.benchmarks, part.scores, strict=True)) for part in (row, self.rows[0])
        )
        return aggregate(scores, full, self.mme_divisor, without)

    def acc_reproduces(self, row: _Row) -> bool:
        """Whether the recomputed Acc. rounds to the printed one."""
        return _rounds_to(self.recompute(row).acc, row.acc, self.decimals)

    def definition(self, row: _Row) -> str:
        """The definition of Rel. that gives the printed value, "both" or "neither".

        The ratio of means is tried with unrounded figures, with printed ones, and with an unrounded
        one over the printed one of the full model, as a table may have been computed in any of
        these ways.
        """
        figures, full = self.recompute(row), self.rows[0].acc
        ratios = (figures.ratio_of_means, 100 * row.acc / full, 100 * figures.acc / full)
        is_ratio = any(_rounds_to(value, row.rel, 1) for value in ratios)
        is_mean = _rounds_to(figures.mean_of_ratios, row.rel, 1)
        if is_ratio:
            return "both" if is_mean else "ratio of means"
        return "mean of ratios" if is_mean else "neither"


def _rounds_to(value: float | None, printed: float, decimals: int) -> bool:
    """Whether a value is within half a unit of the last printed digit, ties included."""
    return value is not None and bool(abs(value - printed) <= 0.5 * 10**-decimals + 1e-9)


def read_published() -> list[_PublishedTable]:
    """The published tables as printed; the first row of each is the full model's."""
    text = Path(__file__).with_name("published.json").read_text(encoding="utf-8")
    return [
        _PublishedTable.model_validate(table, strict=False) for table in json.loads(text)["tables"]
    ]


def main() -> int:
    """Exit status 1 if a printed figure follows none of the definitions, else 0."""
    definitions, reproduced = Counter[str](), 0
    for table in read_published():
        cells = []
        for row in table.rows:
            figures, without = table.recompute(row), table.recompute(row, MMBENCH)
            definition = table.definition(row)
            definitions[definition] += 1
            reproduced += table.acc_reproduces(row)
            ratios = (figures.ratio_of_means, figures.mean_of_ratios)
            others = (without.acc, without.ratio_of_means, without.mean_of_ratios)
            cells.append((
                row.method, str(row.tokens), f"{row.acc:.{table.decimals}f}", f"{figures.acc:.3f}",
                f"{row.rel:.1f}", *(f"{ratio:.2f}" for ratio in ratios), definition,
                *(f"{figure:.2f}" for figure in others),
            ))  # fmt: skip
        print(f"\n{table.table}, {table.backbone}\n\n{Table('', _COLUMNS, cells).markdown()}")
    kinds = ", ".join(f"{kind}: {count}" for kind, count in definitions.most_common())
    total = definitions.total()
    print(f"\nAcc. reproduces in {reproduced} of {total} rows. Printed Rel. follows {kinds}.")
    return 0 if reproduced == total and "neither" not in definitions else 1


if __name__ == "__main__":
    sys.exit(main())
