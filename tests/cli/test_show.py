"""Descriptions of states."""

from __future__ import annotations

import pytest

from tests.tpdsl.samples import state
from vllm_autoprune import BudgetError
from vllm_autoprune.cli.commands.show import describe


def test_description_of_the_shipped_state() -> None:
    description = describe(state())
    assert (description["budget"], description["q_e"], description["r_min"]) == ((32, 32), 2, 30)
    assert description["base_policy"]["atom"] == "cdpruner"
    assert [part["atom"] for part in description["pool"]] == [
        "quality_pool_builder",
        "diversity_pool_builder",
    ]
    assert description["pool"][1]["parameters"] == {"pool_ratio": 0.5}
    assert description["reads"] == ["cls_attention", "instruction"]
    assert sum(signal["share"] for signal in description["signals"]) == pytest.approx(1)
    assert description["signals"][0]["share"] == pytest.approx(0.4)
    assert "weight" not in description["signals"][0]["parameters"]
    text = " ".join(description["words"])
    assert "Keeps 32 visual tokens" in text and "At most 2" in text and "at least 30" in text
    assert "two questions on one image" in text


def test_another_budget() -> None:
    description = describe(state(), 64)
    assert (description["budget"], description["r_min"]) == ((64, 64), 62)
    with pytest.raises(BudgetError):
        describe(state(), 0)


def test_a_base_policy_alone() -> None:
    alone = state({"/constraints/selector/q_e": 0, "/base_policy": {"name": "divprune"}})
    description = describe(alone)
    assert description["reads"] == []
    assert "the base policy alone chooses" in description["words"][1]
    assert "share its KV cache" in description["words"][2]


def test_weightless_signals_have_no_share() -> None:
    none = state({f"/scoring/signals/{i}/weight": 0.0 for i in range(5)})
    assert [signal["share"] for signal in describe(none)["signals"]] == [0.0] * 5


def test_a_budget_that_follows_the_image() -> None:
    ratio = {"atom": "ratio_budget", "ratio": 0.1, "floor": 8, "ceiling": 64}
    description = describe(state({"/budget": ratio}))
    assert description["budget"] == (8, 64)
    assert "Keeps 8 to 64, by its size" in description["words"][0]
    assert describe(state({"/budget": ratio}), 20)["budget"] == (20, 20)


def test_a_core_is_described_with_the_number_of_its_tokens() -> None:
    split = state({"/core": {"share": 0.75, "cover": 0.25}})
    description = describe(split, 64)
    assert description["core"] is not None
    assert (description["core"]["tokens"], description["core"]["policy"]["atom"]) == (
        48,
        "divprune",
    )
    words = " ".join(description["words"])
    assert "48 of them are the core, chosen by divprune without the question" in words
    assert "questions on one image share the KV cache of its core" in words
    assert describe(state())["core"] is None
    assert "core" not in " ".join(describe(state())["words"])


def test_a_state_that_is_all_core_is_described_as_one_that_reads_no_question() -> None:
    words = " ".join(describe(state({"/core": {"share": 1.0}}), 64)["words"])
    assert "all chosen by divprune" in words and "does not read the instruction" in words


def test_a_state_that_ranks_before_the_merger_says_so() -> None:
    assert describe(state())["rank_at"] == "merger_out"
    assert "patch merger" not in " ".join(describe(state())["words"])
    for more in ({}, {"/core": {"share": 1.0}}):
        before = describe(state({"/rank_at": "merger_in", **more}))
        assert before["rank_at"] == "merger_in"
        assert "before it merges them" in " ".join(before["words"])
