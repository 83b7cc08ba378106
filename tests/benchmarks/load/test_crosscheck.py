"""Agreement with ``vllm bench serve`` as defined; ``make bench-check`` measures it."""

from __future__ import annotations

import pytest

from benchmarks.common import BenchmarkError
from benchmarks.load.crosscheck import FIGURES, Agreement, their_figures


def agreement(ours: list[float], theirs: list[float], *, valid: bool = True) -> Agreement:
    def rounds(values: list[float]) -> list[dict[str, float]]:
        return [dict.fromkeys(FIGURES, value) for value in values]

    return Agreement(rounds(ours), rounds(theirs), 0.1, valid)


def test_tolerance_is_relative() -> None:
    assert agreement([0.109], [0.1]).holds and agreement([0.091], [0.1]).holds
    assert not agreement([0.111], [0.1]).holds
    # Three milliseconds in any case: the error declared for the stop-watch.
    assert agreement([0.0129], [0.010]).holds and not agreement([0.0131], [0.010]).holds


def test_medians_over_rounds_are_compared() -> None:
    assert agreement([0.1, 0.1, 0.9], [0.1, 0.1, 0.1]).holds


def test_failed_runs_do_not_agree() -> None:
    assert not agreement([0.1], [0.1], valid=False).holds


def test_lines_contain_both_figures_and_the_tolerance() -> None:
    first, *_, last = agreement([0.12, 0.12], [0.1, 0.101]).format()
    assert first == (
        "median TTFT: 120.00 ms here, 100.50 ms vllm bench serve, +19.4 %: DISAGREE "
        "(tolerance 10.1 ms, rounds of one tool up to 1.0 ms apart)"
    )
    assert last == "does not hold"


def test_scatter_above_the_tolerance_is_inconclusive() -> None:
    result = agreement([0.10, 0.12], [0.1, 0.3])
    *_, last = result.format()
    assert not result.holds and last.startswith("inconclusive: rounds vary")


def test_an_incomplete_result_file_is_refused() -> None:
    whole = {"completed": 5, "median_ttft_ms": 100, "mean_tpot_ms": 10, "median_e2el_ms": 170}
    assert their_figures(whole, 5) == dict(zip(FIGURES, (0.1, 0.01, 0.17), strict=True))
    with pytest.raises(BenchmarkError, match="4 of 5 answered"):
        their_figures({**whole, "completed": 4}, 5)
    with pytest.raises(BenchmarkError, match="has no median_ttft_ms"):
        their_figures({"completed": 5, "mean_tpot_ms": 1, "median_e2el_ms": 1}, 5)
