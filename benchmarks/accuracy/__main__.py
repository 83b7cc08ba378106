"""`python -m benchmarks.accuracy`: print the published tables with every figure recomputed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.evaluation import published
from vllm_autoprune.evaluation.published import read_published
from vllm_autoprune.evaluation.scoring import MMBENCH
from vllm_autoprune.report import Table

_COLUMNS = (
    "method", "K", "Acc. printed", "Acc.", "Rel. printed", "ratio of means", "mean of ratios",
    "follows", "Acc. w/o MMB", "ratio of means w/o MMB", "mean of ratios w/o MMB",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a printed figure follows none of the definitions, else 0."""
    parser = CommandParser(
        prog="python -m benchmarks.accuracy",
        description="Print the published tables with every figure recomputed.",
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of Markdown")
    options = parser.parse_args(arguments)
    tables = read_published().tables
    print(_as_json(tables) if options.json else "\n".join(_as_markdown(tables)))
    reproduced = (
        table.acc_reproduces(row) and table.definition(row) != "neither"
        for table in tables
        for row in table.rows
    )
    return 0 if all(reproduced) else 1


def _as_markdown(tables: Sequence[published.Table]) -> Iterator[str]:
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


def _as_json(tables: Sequence[published.Table]) -> str:
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
