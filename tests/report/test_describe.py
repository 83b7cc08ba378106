"""States in words, and side by side."""

from __future__ import annotations

import pytest

from tests.tpdsl.samples import state
from vllm_autoprune import BudgetError
from vllm_autoprune.report.describe import compare, describe


def test_what_a_state_says() -> None:
    found = describe(state())
    assert (found.budget, found.q_e, found.r_min) == ((32, 32), 2, 30)
    assert found.base_policy.atom == "cdpruner"
    assert [part.atom for part in found.pool] == ["quality_pool_builder", "diversity_pool_builder"]
    assert found.pool[1].parameters == {"pool_ratio": 0.5}
    assert found.reads == ("cls_attention", "instruction")
    assert sum(signal.share for signal in found.signals) == pytest.approx(1)
    assert found.signals[0].share == pytest.approx(0.4)
    assert "weight" not in found.signals[0].parameters
    said = " ".join(found.words)
    assert "Keeps 32 visual tokens" in said and "At most 2" in said and "at least 30" in said
    assert "two questions on one image" in said


def test_another_budget() -> None:
    found = describe(state(), 64)
    assert (found.budget, found.r_min) == ((64, 64), 62)
    with pytest.raises(BudgetError):
        describe(state(), 0)


def test_a_base_policy_alone() -> None:
    alone = state({"/constraints/selector/q_e": 0, "/base_policy": {"name": "divprune"}})
    found = describe(alone)
    assert found.reads == ()
    assert "the base policy alone chooses" in found.words[1]
    assert "share its KV cache" in found.words[2]


def test_weightless_signals_have_no_share() -> None:
    none = state({f"/scoring/signals/{i}/weight": 0.0 for i in range(5)})
    assert [signal.share for signal in describe(none).signals] == [0.0] * 5


def test_states_that_behave_alike_have_one_digest() -> None:
    found = compare(state(), state({"/name": "other", "/safety": [{"atom": "preserve_budget"}]}))
    assert not found.same_behaviour
    named = compare(state(), state({"/name": "other"}))
    assert named.same_behaviour
    assert [change.where for change in named.changes] == ["/name"]


def test_a_default_written_out_is_no_difference() -> None:
    found = compare(state(), state({"/scoring/signals/0/sign": "auto"}))
    assert found.changes == () and found.same_behaviour


def test_a_budget_that_follows_the_image() -> None:
    ratio = {"atom": "ratio_budget", "ratio": 0.1, "floor": 8, "ceiling": 64}
    found = describe(state({"/budget": ratio}))
    assert found.budget == (8, 64)
    assert "Keeps 8 to 64, by its size" in found.words[0]
    assert describe(state({"/budget": ratio}), 20).budget == (20, 20)
