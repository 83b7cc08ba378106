from __future__ import annotations

import pytest

from vllm_autoprune.pages.axes import Axis, fit_axis, format_tick


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (Axis(0.0, 11.0), [0, 2, 4, 6, 8, 10]),
        (Axis(-0.31, 0.02), [-0.3, -0.2, -0.1, 0]),
        (Axis(60.0, 2100.0, "log"), [100, 200, 500, 1000, 2000]),
        (Axis(0.9, 2e6, "log"), [1, 10, 100, 1000, 10_000, 100_000, 1_000_000]),
        (Axis(90.0, 130.0, "log"), [90, 100, 110, 120, 130]),
    ],
)
def test_ticks_are_round_numbers_within_the_axis(axis: Axis, ticks: list[float]) -> None:
    assert axis.ticks() == pytest.approx(ticks)


def test_all_values_are_visible_on_a_fitted_axis() -> None:
    values = [-3.0, 0.4, 7.0]
    axis = fit_axis(values)
    assert axis.low < -3.0 and axis.high > 7.0
    assert [axis.share(value) for value in values] == sorted(axis.share(v) for v in values)
    assert fit_axis([2.0, 5.0], zero=True).low == 0.0
    assert fit_axis([100.0, 100.0], most=100.0) == Axis(96.0, 100.0)
    log = fit_axis([0.0, 10.0, 1000.0], "log")
    assert log.scale == "log" and 0 < log.low < 10.0 and log.high > 1000.0


@pytest.mark.parametrize("values", [[], [5.0], [0.0], [float("nan")], [1e-9, 1e9]])
def test_an_axis_of_few_or_extreme_values_has_a_length(values: list[float]) -> None:
    axis = fit_axis(values)
    assert axis.high > axis.low and axis.ticks()


def test_ticks_of_one_axis_have_the_same_decimals() -> None:
    labels = [name for name, _ in Axis(-0.17, 0.01).labelled_ticks()]
    assert labels == ["-0.15", "-0.10", "-0.05", "0"]
    assert [name for name, _ in Axis(0.0, 3000.0).labelled_ticks()][-1] == "3,000"
    assert [name for name, _ in Axis(0.5, 20.0, "log").labelled_ticks()] == [
        "0.5", "1", "2", "5", "10", "20",
    ]  # fmt: skip


def test_ticks_are_written_without_floating_point_noise() -> None:
    assert [format_tick(v) for v in (0.30000000000000004, 2000.0, 10_000.0, -0.05)] == [
        "0.3", "2,000", "10,000", "-0.05",
    ]  # fmt: skip
