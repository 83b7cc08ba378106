"""Tables of a comparison of strategies, from the results of its searches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.search.results import CURVE_SHARES, SearchResult, read_results, results_of
from offline_search.report import table

# Two-sided 95 % quantiles of Student's t distribution, for 1 to 9 degrees of freedom.
_T_QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

Results = Mapping[int, SearchResult]
"""Results of one strategy, by seed."""


def as_markdown(folder: Path, strategies: Sequence[str], seeds: Sequence[int]) -> str:
    """Tables of test results and learning curves, and paired differences between neighbours."""
    return "\n".join(_lines(folder, strategies, seeds)) + "\n"


def _lines(folder: Path, strategies: Sequence[str], seeds: Sequence[int]) -> Iterator[str]:
    known = read_results(folder)
    results = {strategy: results_of(known, strategy, seeds) for strategy in strategies}
    head = [
        "strategy", "seeds", "test objective", "gain over base", "accuracy %", "answers",
        "invalid %",
    ]  # fmt: skip
    rows = [_result_row(strategy, own) for strategy, own in results.items()]
    yield from table(head, rows, "lrrrrrr")
    yield ""
    curves = [
        [strategy, *_curve_cells(own)] for strategy, own in results.items() if _objectives(own)
    ]
    head = ["search objective after", *(f"{share:.0%}" for share in CURVE_SHARES)]
    yield from table(head, curves, "lrrrr")
    yield ""
    for first, second in pairwise(strategies):
        if differences := _paired_differences(results[first], results[second]):
            yield f"- {first} less {second}, paired by seed: {format_mean(differences)}"


def _objectives(results: Results) -> dict[int, float]:
    """Test objectives of the searches that have a winner, by seed."""
    return {
        seed: result.winner.objective
        for seed, result in results.items()
        if result.winner is not None
    }


def _paired_differences(first: Results, second: Results) -> list[float]:
    """Differences of the test objectives, for seeds for which both strategies have a winner."""
    others = _objectives(second)
    return [
        objective - others[seed] for seed, objective in _objectives(first).items() if seed in others
    ]


def _result_row(strategy: str, results: Results) -> list[str]:
    """Test results of a strategy, mean over seeds; invalid candidates of all its searches."""
    winners = [result.winner for result in results.values() if result.winner is not None]
    candidates = sum(result.candidates for result in results.values())
    invalid = sum(result.invalid for result in results.values())
    share = f"{100 * invalid / candidates:.0f}" if candidates else ""
    if not winners:
        return [strategy, "0", *[""] * 4, share]
    return [
        strategy,
        str(len(winners)),
        format_mean([winner.objective for winner in winners]),
        format_mean([winner.gain for winner in winners]),
        format_mean([100 * winner.accuracy for winner in winners], 1),
        f"{statistics.mean(one.answers for one in results.values() if one.winner):.0f}",
        share,
    ]


def _curve_cells(results: Results) -> list[str]:
    """Best objective after shares of the evaluations, mean over searches with a winner."""
    cells = []
    curves = [result.curve for result in results.values() if result.winner is not None]
    for best in zip(*curves, strict=True):
        known = [value for value in best if value is not None]
        cells.append(f"{statistics.mean(known):.4f}" if len(known) == len(best) else "")
    return cells


def format_mean(values: Sequence[float], digits: int = 4) -> str:
    """Mean with its 95 % confidence interval by Student's t; only the mean of a single value."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    width = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.{digits}f} ± {width:.{digits}f}"


def t_quantile(freedom: int) -> float:
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
