"""`python -m benchmarks.accuracy`: print the published tables with every figure recomputed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.evaluation.published import Audit, audit, read_published
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
    rows = list(audit(read_published()))
    print(_as_json(rows) if options.json else "\n".join(_as_markdown(rows)))
    return 0 if all(row.acc_reproduces and row.follows != "neither" for row in rows) else 1


def _as_markdown(rows: Sequence[Audit]) -> Iterator[str]:
    """One table for each published one, and a summary."""
    for table, audits in groupby(rows, key=lambda row: row.table):
        cells = [
            (
                row.row.method, str(row.row.tokens), f"{row.row.acc:.{table.decimals}f}",
                f"{row.acc:.3f}", f"{row.row.rel:.1f}", f"{row.ratio_of_means:.2f}",
                f"{row.mean_of_ratios:.2f}", row.follows, f"{row.acc_without_mmbench:.2f}",
                f"{row.ratio_of_means_without_mmbench:.2f}",
                f"{row.mean_of_ratios_without_mmbench:.2f}",
            )
            for row in audits
        ]  # fmt: skip
        yield f"\n{table.table}, {table.backbone}\n"
        yield Table("", _COLUMNS, cells).markdown()
    counts = Counter(row.follows for row in rows)
    reproduced = sum(row.acc_reproduces for row in rows)
    kinds = ", ".join(f"{kind}: {count}" for kind, count in counts.most_common())
    yield f"\nAcc. reproduces in {reproduced} of {len(rows)} rows. Printed Rel. follows {kinds}."


def _as_json(rows: Sequence[Audit]) -> str:
    """All rows with their printed and recomputed figures."""
    records = [
        {
            "table": row.table.table,
            "backbone": row.table.backbone,
            **row.row.model_dump(),
            "acc_computed": row.acc,
            "ratio_of_means": row.ratio_of_means,
            "mean_of_ratios": row.mean_of_ratios,
            "acc_without_mmbench": row.acc_without_mmbench,
            "ratio_of_means_without_mmbench": row.ratio_of_means_without_mmbench,
            "mean_of_ratios_without_mmbench": row.mean_of_ratios_without_mmbench,
        }
        for row in rows
    ]
    return json.dumps(records, indent=1)


if __name__ == "__main__":
    sys.exit(main())
