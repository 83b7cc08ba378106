"""The paper's tables of proposers and of seeds: candidates of each search, from its ledger.

Valid are candidates that loaded and passed the safety check; best, mean, worst and standard
deviation are over the objectives of those that were evaluated to the end.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from offline_search.ledger import read_ledger
from offline_search.report import SearchReport, read_report, table

_HEAD = ("candidates", "valid", "evaluated", "best", "mean", "worst", "std")


def as_markdown(ledgers: Sequence[Path]) -> str:
    """A row for each search, and a row for each proposer over all of its searches."""
    reports = {path: read_report(read_ledger(path)) for path in ledgers}
    searches = [
        [path.stem, _proposer(report), str(report.settings.seed), *_figures([report])]
        for path, report in reports.items()
    ]
    proposers: dict[str, list[SearchReport]] = {}
    for report in reports.values():
        proposers.setdefault(_proposer(report), []).append(report)
    by_proposer = [[name, str(len(own)), *_figures(own)] for name, own in proposers.items()]
    return "\n".join([
        *table(["search", "proposer", "seed", *_HEAD], searches, "llrrrrrrrr"), "",
        *table(["proposer", "searches", *_HEAD], by_proposer, "lrrrrrrrr"),
    ]) + "\n"  # fmt: skip


def _proposer(report: SearchReport) -> str:
    return report.settings.proposer or "none"


def _figures(reports: Sequence[SearchReport]) -> Iterator[str]:
    rows = [row for report in reports for row in report.rows]
    objectives = [row.objective for row in rows if row.objective is not None]
    yield str(len(rows))
    yield str(sum(row.result.status not in ("invalid", "unsafe") for row in rows))
    yield str(len(objectives))
    if not objectives:
        yield from ("-",) * 4
        return
    for value in (max(objectives), statistics.mean(objectives), min(objectives)):
        yield f"{value:.3f}"
    yield f"{statistics.stdev(objectives):.3f}" if len(objectives) > 1 else "-"
