"""The knee and the highest rate, on sweeps whose answer is plain."""

from __future__ import annotations

from benchmarks.load.load import Load, Slo
from benchmarks.load.points import Point
from benchmarks.load.sweep import grid, over, sweep
from tests.benchmarks.load.samples import point

SLO = Slo(ttft=0.5)


def at(rate: float, ttft: float, *, valid: bool = True, late: int = 0) -> Point:
    """200 requests at this rate; ``late`` of them take two seconds."""
    times = [2.0 if n < late else ttft for n in range(200)]
    return point("stock", Load(rate=rate), [times], every=1 / rate, valid=valid, slo=SLO)


def test_the_knee_comes_before_the_promise_breaks() -> None:
    found = sweep([at(8, 3.0), at(1, 0.1), at(2, 0.15), at(4, 0.45)], SLO)
    assert list(found.rates) == [1, 2, 4, 8]
    assert (found.knee, found.highest, found.surely) == (2, 4, 4)


def test_a_rate_counts_only_where_all_lower_ones_hold() -> None:
    assert sweep([at(1, 0.1), at(2, 0.6), at(4, 0.1)], SLO).highest == 1
    assert sweep([at(1, 0.9)], SLO).highest is None


def test_a_run_that_is_not_valid_ends_the_climb() -> None:
    found = sweep([at(1, 0.1), at(2, 0.1, valid=False), at(4, 0.1)], SLO)
    assert (found.knee, found.highest, found.cut) == (1, 1, True)
    assert not sweep([at(1, 0.1), at(2, 0.9)], SLO).cut


def test_one_late_request_in_a_hundred_is_kept_but_not_surely() -> None:
    found = sweep([at(1, 0.1), at(2, 0.1, late=2)], SLO)
    assert (found.highest, found.surely) == (2, 1)
    assert sweep([at(1, 0.1), at(2, 0.1, late=5)], SLO).highest == 1


def test_a_sweep_says_whether_it_reached_saturation() -> None:
    assert not sweep([at(1, 0.1), at(2, 0.1)], SLO).saturated
    # The last request is answered a hundred seconds after it was due: the server fell behind.
    assert sweep([at(1, 0.1), at(4, 100.0)], SLO).saturated


def test_climbing_ends_where_most_promises_break() -> None:
    assert over(at(4, 3.0)) and not over(at(4, 0.1))


def test_rates_are_around_the_capacity() -> None:
    rates = grid(10.0)
    assert rates[0] == 3 and 10 in rates and list(rates) == sorted(rates)


def test_of_no_point_nothing_is_known() -> None:
    found = sweep([point("stock", Load(users=1), [[0.1]])], SLO)
    assert (found.rates, found.knee, found.highest) == ((), None, None)
