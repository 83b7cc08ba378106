"""The knee and the highest rate of hand-written sweeps."""

from __future__ import annotations

from benchmarks.load.points import Point, ttft
from benchmarks.load.schedule import Load, Slo
from benchmarks.load.sweep import build_sweep, choose_rates, is_past_saturation
from tests.benchmarks.load.samples import point

SLO = Slo(ttft=0.5)


def at(rate: float, ttft: float, *, valid: bool = True, late: int = 0) -> Point:
    """200 requests at this rate; ``late`` of them take two seconds."""
    times = [2.0 if n < late else ttft for n in range(200)]
    return point("stock", Load(rate=rate), [times], every=1 / rate, valid=valid, slo=SLO)


def test_the_knee_may_lie_below_the_highest_good_rate() -> None:
    sweep = build_sweep([at(8, 3.0), at(1, 0.1), at(2, 0.15), at(4, 0.45)], SLO)
    assert list(sweep.rates) == [1, 2, 4, 8]
    assert (sweep.knee.holds, sweep.highest.holds, sweep.surely.holds) == (2, 4, 4)
    assert (sweep.knee.fails, sweep.highest.fails) == (4, 8)
    assert (str(sweep.knee), str(sweep.highest)) == ("2", "4")


def test_a_rate_counts_only_if_all_lower_rates_hold() -> None:
    assert str(build_sweep([at(1, 0.1), at(2, 0.6), at(4, 0.1)], SLO).highest) == "1"
    assert str(build_sweep([at(1, 0.9)], SLO).highest) == "below 1"
    assert str(build_sweep([at(1, 0.1), at(2, 0.1)], SLO).highest) == "at least 2"


def test_invalid_runs_count_as_unknown() -> None:
    invalid = at(2, 0.1, valid=False)
    assert str(build_sweep([at(1, 0.1), invalid, at(4, 0.1), at(8, 0.9)], SLO).highest) == "4"
    assert str(build_sweep([at(1, 0.1), invalid, at(4, 0.9)], SLO).highest) == "1 to 4"
    assert str(build_sweep([at(1, 0.1), invalid], SLO).highest) == "at least 1"
    assert str(build_sweep([invalid, at(4, 0.9)], SLO).highest) == "below 4"
    assert str(build_sweep([invalid], SLO).highest) == "not known"
    # The knee is relative to the lowest valid rate.
    slow_start = [at(1, 0.01, valid=False), at(2, 0.1), at(4, 0.15), at(8, 0.25)]
    assert str(build_sweep(slow_start, SLO).knee) == "4"


def test_a_rate_above_capacity_does_not_hold() -> None:
    # 200 requests due in a second meet the objective in this short run, but are not answered at
    # that rate: the queue would grow without bound.
    times = [[0.1 + 0.0025 * n for n in range(100)]]
    burst = point("stock", Load(rate=200), times, every=1 / 200, slo=SLO)
    sweep = build_sweep([at(1, 0.1), burst], SLO)
    assert burst.distribution(ttft) is not None
    assert (str(sweep.highest), sweep.saturated) == ("1", True)


def test_the_last_answer_does_not_count_as_backlog() -> None:
    # Ten requests within a second, each answered after 0.4 s: completed over 1.3 s, kept up with.
    short = point("stock", Load(rate=10), [[0.4] * 10], every=0.1, slo=SLO)
    assert short.completed < 0.8 * 10 < short.answered(0.4)
    assert str(build_sweep([short], SLO).highest) == "at least 10"


def test_the_upper_bound_is_stricter_than_the_estimate() -> None:
    sweep = build_sweep([at(1, 0.1), at(2, 0.1, late=2)], SLO)
    assert (sweep.highest.holds, sweep.surely.holds) == (2, 1)
    assert build_sweep([at(1, 0.1), at(2, 0.1, late=5)], SLO).highest.holds == 1


def test_a_sweep_reports_whether_it_reached_saturation() -> None:
    assert not build_sweep([at(1, 0.1), at(2, 0.1)], SLO).saturated
    # Each request waits a quarter of a second longer than the one before: the queue grows.
    waits = [[0.25 * n for n in range(1, 201)]]
    behind = point("stock", Load(rate=4), waits, every=0.25, slo=SLO)
    assert build_sweep([at(1, 0.1), behind], SLO).saturated


def test_a_sweep_stops_where_most_requests_miss_the_objective() -> None:
    assert is_past_saturation(at(4, 3.0)) and not is_past_saturation(at(4, 0.1))


def test_rates_are_around_the_capacity() -> None:
    rates = choose_rates(10.0)
    assert rates[0] == 3 and 10 in rates and list(rates) == sorted(rates)


def test_a_sweep_without_open_loops_is_unknown() -> None:
    sweep = build_sweep([point("stock", Load(users=1), [[0.1]])], SLO)
    assert sweep.rates == ()
    assert str(sweep.knee) == str(sweep.highest) == "not known"
