"""Tables of a comparison of strategies, from the ledgers of its searches alone."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.search.comparison import ledger_path
from offline_search.ledger import read_ledger
from offline_search.ledger.records import WinnerRecord
from offline_search.report import SearchReport, read_report
from offline_search.report.markdown import table

_CURVE_SHARES = (0.1, 0.2, 0.4, 1.0)

# Two-sided 95 % quantiles of Student's t distribution, for 1 to 9 degrees of freedom.
_T_QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Outcome:
    """Result of one finished search."""

    seed: int
    winner: WinnerRecord
    spent: int


def read_outcomes(folder: Path, strategy: str, seeds: Sequence[int]) -> list[Outcome]:
    """Results of a strategy's finished searches."""
    return _outcomes(_read_reports(folder, strategy, seeds))


def _outcomes(reports: Mapping[int, SearchReport]) -> list[Outcome]:
    return [
        Outcome(seed, winner, report.rows[-1].spent)
        for seed, report in reports.items()
        if (winner := report.winner) is not None
    ]


def _read_reports(folder: Path, strategy: str, seeds: Sequence[int]) -> dict[int, SearchReport]:
    """Reports of a strategy's searches that have begun, by seed."""
    paths = {seed: ledger_path(folder, strategy, seed) for seed in seeds}
    return {
        seed: read_report(read_ledger(path))
        for seed, path in paths.items()
        if path.exists() and path.stat().st_size
    }


def as_markdown(folder: Path, strategies: Sequence[str], seeds: Sequence[int]) -> str:
    """Tables of test results and learning curves, and paired differences between neighbours."""
    return "\n".join(_lines(folder, strategies, seeds)) + "\n"


def _lines(folder: Path, strategies: Sequence[str], seeds: Sequence[int]) -> Iterator[str]:
    reports = {strategy: _read_reports(folder, strategy, seeds) for strategy in strategies}
    results = {strategy: _outcomes(begun) for strategy, begun in reports.items()}
    head = [
        "strategy", "seeds", "test objective", "gain over base", "accuracy %", "answers",
        "invalid %",
    ]  # fmt: skip
    rows = [
        [*_result_row(strategy, outcomes), _invalid_share(reports[strategy].values())]
        for strategy, outcomes in results.items()
    ]
    yield from table(head, rows, "lrrrrrr")
    yield ""
    curves = [
        [strategy, *_curve_cells(reports[strategy].values())]
        for strategy in strategies
        if results[strategy]
    ]
    head = ["search objective after", *(f"{share:.0%}" for share in _CURVE_SHARES)]
    yield from table(head, curves, "lrrrr")
    yield ""
    for first, second in pairwise(strategies):
        if differences := _paired_differences(results[first], results[second]):
            yield f"- {first} less {second}, paired by seed: {format_mean(differences)}"


def _paired_differences(first: Sequence[Outcome], second: Sequence[Outcome]) -> list[float]:
    """Differences of the test objectives, for seeds that both strategies have finished."""
    others = {outcome.seed: outcome.winner.test.objective.value for outcome in second}
    return [
        outcome.winner.test.objective.value - others[outcome.seed]
        for outcome in first
        if outcome.seed in others
    ]


def _result_row(strategy: str, outcomes: Sequence[Outcome]) -> list[str]:
    """Test results of a strategy, mean over seeds."""
    if not outcomes:
        return [strategy, "0", *[""] * 4]
    tests = [outcome.winner.test for outcome in outcomes]
    return [
        strategy,
        str(len(outcomes)),
        format_mean([test.objective.value for test in tests]),
        format_mean([test.gain.value for test in tests]),
        format_mean([100 * test.accuracy for test in tests], 1),
        f"{statistics.mean(outcome.spent for outcome in outcomes):.0f}",
    ]


def _invalid_share(reports: Iterable[SearchReport]) -> str:
    """Share of all candidates that were invalid or unsafe, also of searches without a winner."""
    statuses: Counter[str] = Counter()
    for report in reports:
        statuses.update(report.statuses)
    invalid = statuses["invalid"] + statuses["unsafe"]
    return f"{100 * invalid / statuses.total():.0f}" if statuses else ""


def _curve_cells(reports: Iterable[SearchReport]) -> list[str]:
    """Best objective after shares of the evaluations, mean over finished searches."""
    finished = [report for report in reports if report.winner is not None]
    cells = []
    for share in _CURVE_SHARES:
        best = [_best_after(report, share) for report in finished]
        known = [value for value in best if value is not None]
        cells.append(f"{statistics.mean(known):.4f}" if len(known) == len(best) else "")
    return cells


def _best_after(report: SearchReport, share: float) -> float | None:
    """Best objective after a share of all answers."""
    limit = share * report.rows[-1].spent
    values = [value for spent, value in report.curve() if spent <= limit]
    return values[-1] if values else None


def format_mean(values: Sequence[float], digits: int = 4) -> str:
    """Mean with its 95 % confidence interval by Student's t; only the mean of a single value."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    width = _t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.{digits}f} ± {width:.{digits}f}"


def _t_quantile(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t distribution.

    Above the table by the expansion around the normal quantile (Abramowitz and Stegun, 26.7.5),
    which is right to three decimals there.
    """
    if freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
