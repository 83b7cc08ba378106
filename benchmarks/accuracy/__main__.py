"""`python -m benchmarks.accuracy`: the published tables, each figure computed anew.

Knows nothing about how: it prints what ``published`` finds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.accuracy.published import Audit, audit, published

COLUMNS = (
    "method", "K", "Acc. printed", "Acc.", "Rel. printed", "ratio of means", "mean of ratios",
    "follows", "Acc. w/o MMB", "ratio of means w/o MMB", "mean of ratios w/o MMB",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every printed figure follows some definition, 1 where one follows none."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    made.add_argument("--json", action="store_true", help="JSON instead of Markdown")
    chosen = made.parse_args(arguments)
    source = published()
    rows = list(audit(source))
    print(_json(rows) if chosen.json else "\n".join(markdown(rows)))
    return 0 if all(row.acc_reproduces and row.follows != "neither" for row in rows) else 1


def markdown(rows: Sequence[Audit]) -> Iterator[str]:
    """A table for each published one, then what they add up to."""
    shown = None
    for row in rows:
        if row.table is not shown:
            shown = row.table
            yield f"\n{shown.table}, {shown.backbone}\n"
            yield f"| {' | '.join(COLUMNS)} |"
            yield "|" + " --- |" * len(COLUMNS)
        yield f"| {' | '.join(_cells(row))} |"
    told = Counter(row.follows for row in rows)
    right = sum(row.acc_reproduces for row in rows)
    kinds = ", ".join(f"{kind}: {number}" for kind, number in told.most_common())
    yield f"\nAcc. reproduces in {right} of {len(rows)} rows. Printed Rel. follows {kinds}."


def _cells(row: Audit) -> tuple[str, ...]:
    return (
        row.row.method,
        str(row.row.tokens),
        f"{row.row.acc:.{row.table.decimals}f}",
        f"{row.acc:.3f}",
        f"{row.row.rel:.1f}",
        f"{row.ratio_of_means:.2f}",
        f"{row.mean_of_ratios:.2f}",
        row.follows,
        f"{row.acc_without_mmbench:.2f}",
        f"{row.ratio_of_means_without_mmbench:.2f}",
        f"{row.mean_of_ratios_without_mmbench:.2f}",
    )


def _json(rows: Sequence[Audit]) -> str:
    told = [
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
    return json.dumps(told, indent=1)


if __name__ == "__main__":
    sys.exit(main())
