"""Configurations of the demo: rows, request fields, order."""

from __future__ import annotations

from collections import Counter

from benchmarks.demo.configurations import (
    BUDGETS,
    FULL,
    KEEPS,
    PRUNED,
    Configuration,
    everything_kept,
    interleaved,
)


def test_the_table_has_every_budget_for_every_way_to_choose() -> None:
    assert BUDGETS == (32, 16, 8, 4)
    assert len(PRUNED) == len(set(PRUNED)) == 16
    assert {(c.keep, c.budget) for c in PRUNED} == {
        (keep, budget) for keep in KEEPS for budget in BUDGETS
    }


def test_a_stock_request_has_no_pruning_fields() -> None:
    assert FULL.extra_body == {}
    assert Configuration("random", 8).extra_body == {
        "mm_processor_kwargs": {"autoprune": {"budget": 8, "keep": "random"}}
    }
    assert everything_kept(144).extra_body == {
        "mm_processor_kwargs": {"autoprune": {"budget": 144, "keep": "state"}}
    }


def test_a_round_asks_every_configuration_once() -> None:
    order = list(interleaved(PRUNED, 5))

    assert Counter(order) == {(number, c): 1 for number in range(5) for c in PRUNED}
    assert [number for number, _ in order] == sorted(number for number, _ in order)


def test_rounds_start_at_different_configurations() -> None:
    a, b, c = PRUNED[:3]

    assert [item for _, item in interleaved((a, b, c), 3)] == [a, b, c, b, c, a, c, a, b]
