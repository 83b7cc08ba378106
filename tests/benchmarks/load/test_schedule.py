"""Schedules: rate, burstiness, seed."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.common import BenchmarkError
from benchmarks.load.schedule import Load, draw_arrivals


def test_a_poisson_schedule_has_its_rate_and_exponential_gaps() -> None:
    gaps = np.diff(draw_arrivals(20_000, 5.0))
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (4.0, 0.5)])
def test_burstiness_is_the_shape_of_the_gamma_distribution(
    burstiness: float, variation: float
) -> None:
    gaps = np.diff(draw_arrivals(20_000, 5.0, burstiness))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_the_seed_fixes_the_pattern_at_every_rate() -> None:
    slow, fast = draw_arrivals(50, 1.0, seed=3), draw_arrivals(50, 4.0, seed=3)
    assert np.allclose(slow, 4 * fast)
    assert not np.allclose(slow, draw_arrivals(50, 1.0, seed=4))
    assert (np.diff(slow) > 0).all()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_measured_requests_come_at_exactly_the_rate(burstiness: float, seed: int) -> None:
    load = Load(rate=6.0, burstiness=burstiness, seed=seed)
    due = load.due(100)
    measured = [at for at, phase in zip(due, load.phases(100), strict=True) if phase == "measured"]
    assert len(measured) == 95
    assert (len(measured) - 1) / (measured[-1] - measured[0]) == pytest.approx(6.0)
    assert len(due) / due[-1] == pytest.approx(6.0)
    assert (np.diff(due) >= 0).all()


@pytest.mark.parametrize(
    ("count", "rate", "burstiness", "named"),
    [(0, 1.0, 1.0, "requests"), (5, 0.0, 1.0, "rate"), (5, 1.0, -1.0, "burstiness")],
)
def test_empty_and_endless_schedules_are_refused(
    count: int, rate: float, burstiness: float, named: str
) -> None:
    with pytest.raises(BenchmarkError, match=f"schedule is empty or has no end: {named}"):
        draw_arrivals(count, rate, burstiness)
