"""Comparison of arms: paired ratios of valid runs, the knee and the highest rate of a sweep."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.load.compare import Point, answer_question, build_sweep, compare_arms, group_runs
from benchmarks.load.experiment import Arm, choose_rates, interleave
from benchmarks.load.settings import Load
from tests.benchmarks.load.samples import SLO, point

LOAD = Load(users=2)
TIMES = [float(t) for t in np.random.default_rng(0).exponential(0.2, 40)]
HALF = [t / 2 for t in TIMES]


def test_ratios_recover_a_common_factor_exactly() -> None:
    stock = point("stock", LOAD, [TIMES, TIMES])
    pruned = point("AutoPrune", LOAD, [HALF, [0.9 * t for t in HALF]])
    elsewhere = point("AutoPrune", Load(rate=9.0), [HALF])  # a load that only one arm has
    compared = compare_arms([stock, pruned, elsewhere])
    assert {(row.arm, row.against, row.load) for row in compared} == {("AutoPrune", "stock", LOAD)}
    by_figure = {row.figure: row for row in compared}
    median, tpot = by_figure["TTFT p50"], by_figure["TPOT p50"].ratio
    assert median.by_pass == pytest.approx((0.5, 0.45))
    assert median.ratio is not None and 0.44 < median.ratio.low <= median.ratio.high < 0.51
    assert tpot is not None and tpot.value == pytest.approx(1.0)
    assert compare_arms([]) == []


def test_invalid_runs_have_no_ratio() -> None:
    stock = point("stock", LOAD, [TIMES])
    pruned = point("AutoPrune", LOAD, [HALF], valid=False)
    assert all(row.ratio is None and not row.by_pass for row in compare_arms([stock, pruned]))


def test_passes_are_grouped_by_arm_and_load() -> None:
    stock = point("stock", LOAD, [TIMES, HALF])
    pruned = point("AutoPrune", LOAD, [HALF])
    assert group_runs([stock.runs[0], pruned.runs[0], stock.runs[1]]) == [stock, pruned]
    assert stock.summary.requests == 80 and stock.summary.ttft is not None
    assert stock.summary.ttft.mean == pytest.approx(0.75 * np.mean(TIMES))


def test_every_second_pass_is_reversed() -> None:
    arms = [Arm(name=name, url="http://x") for name in "ABC"]
    assert "".join(arm.name for _, arm in interleave(arms, 2)) == "ABCCBA"
    assert "".join(arm.name for _, arm in interleave(arms[:2], 4)) == "ABBAABBA"


def at(rate: float, ttft: float, *, valid: bool = True) -> Point:
    """200 requests at this rate."""
    return point("stock", Load(rate=rate), [[ttft] * 200], every=1 / rate, valid=valid)


INVALID = at(2, 0.1, valid=False)
BURST = point("stock", Load(rate=200), [[0.1 + 0.0025 * n for n in range(100)]], every=1 / 200)
SHORT = point("stock", Load(rate=10), [[0.4] * 10], every=0.1)


@pytest.mark.parametrize(
    ("points", "knee", "highest", "saturated"),
    [
        # The knee may lie below the highest good rate.
        ([at(8, 3.0), at(1, 0.1), at(2, 0.15), at(4, 0.45)], "2", "4", True),
        # A rate counts only if all lower ones hold.
        ([at(1, 0.1), at(2, 0.6), at(4, 0.1)], "1", "1", False),
        ([at(1, 0.9)], "at least 1", "below 1", False),
        ([at(1, 0.1), at(2, 0.1)], "at least 2", "at least 2", False),
        # Invalid runs count as unknown, and the knee is relative to the lowest valid rate.
        ([at(1, 0.1), INVALID, at(4, 0.1), at(8, 0.9)], "4", "4", False),
        ([at(1, 0.1), INVALID, at(4, 0.9)], "1 to 4", "1 to 4", False),
        ([at(1, 0.1), INVALID], "at least 1", "at least 1", False),
        ([INVALID, at(4, 0.9)], "at least 4", "below 4", False),
        ([INVALID], "not known", "not known", False),
        ([at(1, 0.01, valid=False), at(2, 0.1), at(4, 0.15), at(8, 0.25)],
         "4", "at least 8", False),
        # 200 requests due in a second meet the objective in a short run, but are not answered at
        # that rate: the queue would grow without bound.
        ([at(1, 0.1), BURST], "1", "1", True),
        # Ten requests within a second, each answered after 0.4 s: the last is no backlog.
        ([SHORT], "at least 10", "at least 10", False),
        ([point("stock", Load(users=1), [[0.1]])], "not known", "not known", False),
    ],
)  # fmt: skip
def test_knee_and_highest_rate(
    points: list[Point], knee: str, highest: str, saturated: bool
) -> None:
    assert build_sweep(points, SLO) == (knee, highest, saturated)


def test_rates_are_around_the_capacity() -> None:
    rates = choose_rates(10.0)
    assert rates[0] == 3 and 10 in rates and list(rates) == sorted(rates)


ENOUGH = [0.1 + 0.001 * (n % 7) for n in range(200)]


def two_arms(load: Load, share: float) -> list[Point]:
    pruned = [share * t for t in ENOUGH]
    return [point("stock", load, [ENOUGH]), point("AutoPrune", load, [pruned])]


@pytest.mark.parametrize(
    ("points", "tone", "sentence"),
    [
        (two_arms(LOAD, 0.5), "good", "At 2 users, AutoPrune needs 50 % less time to the first"),
        (two_arms(LOAD, 2.0), "bad", "At 2 users, AutoPrune needs 100 % more time to the first"),
        (two_arms(LOAD, 1.0), "open", "At 2 users, no difference is shown between the median"),
        ([point("stock", LOAD, [[0.1] * 8])], "open",
         "8 requests at a load are too few for a verdict (20 needed). stock answered"),
        ([point("stock", LOAD, [ENOUGH], valid=False)], "bad", "No valid result"),
        # Not beyond saturation.
        ([point(arm, Load(rate=rate), [[0.1 if rate == 2.0 else 3.0] * 200])
          for arm in ("stock", "AutoPrune") for rate in (2.0, 8.0)], "open", "At 2 requests/s"),
    ],
)  # fmt: skip
def test_the_answer_is_one_sentence_at_the_highest_valid_load(
    points: list[Point], tone: str, sentence: str
) -> None:
    answer = answer_question(points, SLO, None)
    assert answer.tone == tone and answer.sentence.startswith(sentence)
    assert len(answer.limits) == (not points[0].valid)
