"""Paired intervals: they hold the mean, narrow with pairing, and resample whole scenes."""

from __future__ import annotations

import pytest

from benchmarks.minillava.intervals import difference, mean

SCENES = [number // 5 for number in range(200)]


def test_the_mean_lies_in_its_interval() -> None:
    values = [float(number % 3 == 0) for number in range(200)]
    found = mean(values, SCENES)

    assert found.value == pytest.approx(sum(values) / 200)
    assert found.low < found.value < found.high
    assert found == mean(values, SCENES)


def test_pairing_takes_the_luck_of_a_scene_out() -> None:
    luck = [float(scene % 2) for scene in SCENES]
    better = [value + 0.1 for value in luck]
    paired = difference(better, luck, SCENES)

    assert paired.low == pytest.approx(0.1) and paired.high == pytest.approx(0.1)
    assert mean(luck, SCENES).high - mean(luck, SCENES).low > 0.2


def test_questions_of_one_scene_are_not_independent() -> None:
    same = [float(scene % 2) for scene in SCENES]
    mixed = [float(number % 2) for number in range(200)]

    def width(values: list[float]) -> float:
        found = mean(values, SCENES)
        return found.high - found.low

    assert width(same) > 1.5 * width(mixed)


def test_what_cannot_be_paired_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        difference([1.0], [1.0, 0.0], [0])
    with pytest.raises(ValueError, match="at least one"):
        mean([], [])
