"""Comparison of two arms at one load: paired ratios, by pass, of valid runs only."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.load.arms import Arm, interleave
from benchmarks.load.compare import compare_answers, compare_arms
from benchmarks.load.points import group_runs
from benchmarks.load.schedule import Load
from tests.benchmarks.load.samples import point

LOAD = Load(users=2)
TIMES = [float(t) for t in np.random.default_rng(0).exponential(0.2, 40)]
HALF = [t / 2 for t in TIMES]


def test_ratios_recover_a_common_factor_exactly() -> None:
    stock = point("stock", LOAD, [TIMES, TIMES])
    pruned = point("AutoPrune", LOAD, [HALF, [0.9 * t for t in HALF]])
    comparisons = {one.figure: one for one in compare_arms([stock, pruned])}
    first = comparisons["TTFT p50"]
    assert (first.arm, first.against, first.load) == ("AutoPrune", "stock", Load(users=2))
    assert first.by_pass == pytest.approx((0.5, 0.45))
    assert first.ratio is not None and 0.44 < first.ratio.low <= first.ratio.high < 0.51
    tpot = comparisons["TPOT p50"].ratio
    assert tpot is not None and tpot.value == pytest.approx(1.0)


def test_invalid_runs_have_no_ratio() -> None:
    stock = point("stock", LOAD, [TIMES])
    pruned = point("AutoPrune", LOAD, [HALF], valid=False)
    assert all(one.ratio is None and not one.by_pass for one in compare_arms([stock, pruned]))


def test_only_loads_that_both_arms_have_are_compared() -> None:
    comparisons = compare_arms(
        [
            point("stock", LOAD, [TIMES]),
            point("AutoPrune", LOAD, [HALF]),
            point("AutoPrune", Load(rate=9.0), [HALF]),
        ]
    )
    assert {one.load for one in comparisons} == {Load(users=2)}
    assert compare_arms([]) == []


def test_answers_are_compared_across_arms_and_passes() -> None:
    stock, pruned = point("stock", LOAD, [TIMES, TIMES]), point("AutoPrune", LOAD, [HALF])
    records = [
        record.model_copy(update={"text": "no"}) if record.index < 10 else record
        for record in pruned.runs[0].records
    ]
    other = type(pruned.runs[0])("AutoPrune", 0, pruned.runs[0].result, tuple(records), "")
    control, other_arm = compare_answers([stock, type(pruned)("AutoPrune", LOAD, (other,))])
    assert control.against == "stock, pass 1" and control.same is not None
    assert control.same.value == 1.0
    assert other_arm.against == "stock"
    assert other_arm.same is not None and other_arm.same.value == 0.75


def test_passes_are_grouped_by_arm_and_load() -> None:
    first = point("stock", LOAD, [TIMES, HALF])
    other = point("AutoPrune", LOAD, [HALF])
    runs = [first.runs[0], other.runs[0], first.runs[1]]
    assert group_runs(runs) == [first, other]
    assert first.by_request(lambda record: (record.ttft,))[3] == pytest.approx([TIMES[3], HALF[3]])


def test_every_second_pass_is_reversed() -> None:
    arms = [Arm(name=name, url="http://x") for name in "ABC"]
    assert "".join(arm.name for _, arm in interleave(arms, 2)) == "ABCCBA"
    assert "".join(arm.name for _, arm in interleave(arms[:2], 4)) == "ABBAABBA"
