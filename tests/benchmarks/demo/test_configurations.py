"""Configurations of the demo: rows and request fields."""

from __future__ import annotations

from benchmarks.demo.configurations import (
    BUDGETS,
    FULL,
    KEEPS,
    PRUNED,
    Configuration,
    everything_kept,
)


def test_the_table_has_every_budget_for_every_way_to_choose() -> None:
    assert BUDGETS == (16, 8)
    assert len(PRUNED) == len(set(PRUNED)) == 8
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
