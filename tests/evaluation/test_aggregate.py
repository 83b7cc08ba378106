"""Acc. and Rel. by hand, on figures small enough for mental arithmetic."""

from __future__ import annotations

import pytest

from vllm_autoprune.evaluation.aggregate import MMBENCH, accuracy, mean_of_ratios, ratio_of_means

FULL = {"GQA": 60.0, "MME": 1600.0, "MMB-EN": 40.0, "MMB-CN": 20.0}
PRUNED = {"GQA": 30.0, "MME": 1600.0, "MMB-EN": 60.0, "MMB-CN": 20.0}


def test_acc_divides_only_mme() -> None:
    assert accuracy(FULL, 20) == (60 + 80 + 40 + 20) / 4
    assert accuracy({"MME": 2800.0}, 28) == 100


def test_the_two_definitions_of_rel_differ() -> None:
    assert ratio_of_means(PRUNED, FULL, 20) == pytest.approx(100 * 190 / 200)
    assert mean_of_ratios(PRUNED, FULL) == pytest.approx(100 * (0.5 + 1 + 1.5 + 1) / 4)


def test_benchmarks_can_be_left_out_of_both() -> None:
    assert accuracy(PRUNED, 20, MMBENCH) == (30 + 80) / 2
    assert ratio_of_means(PRUNED, FULL, 20, MMBENCH) == pytest.approx(100 * 110 / 140)
    assert mean_of_ratios(PRUNED, FULL, MMBENCH) == pytest.approx(75)


def test_the_divisor_cancels_out_of_a_mean_of_ratios() -> None:
    halved = {name: score / (2 if name == "MME" else 1) for name, score in PRUNED.items()}
    full = {name: score / (2 if name == "MME" else 1) for name, score in FULL.items()}
    assert mean_of_ratios(halved, full) == pytest.approx(mean_of_ratios(PRUNED, FULL))


@pytest.mark.parametrize("other", [{"GQA": 1.0}, {**FULL, "POPE": 80.0}])
def test_scores_on_other_benchmarks_are_refused(other: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="not scored on the same benchmarks"):
        mean_of_ratios(other, FULL)
    with pytest.raises(ValueError, match="not scored on the same benchmarks"):
        ratio_of_means(other, FULL, 20)


def test_without_benchmarks_there_is_no_mean() -> None:
    with pytest.raises(ValueError, match="no benchmark is left"):
        accuracy({"MMB-EN": 50.0}, 20, MMBENCH)
