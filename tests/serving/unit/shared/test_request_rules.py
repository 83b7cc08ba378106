from __future__ import annotations

import pytest

from vllm_autoprune.errors import Problem
from vllm_autoprune.serving.shared.request_rules import LEVELS, RequestRules, parse_rules


def read(value: object) -> tuple[RequestRules, list[Problem]]:
    problems: list[Problem] = []
    return parse_rules(value, problems), problems


def test_default_is_budget_with_vllm_s_own_check() -> None:
    assert read(None) == (RequestRules("budget", 1, 65536, explicit=False), [])


@pytest.mark.parametrize("level", LEVELS)
def test_levels_are_cumulative(level: str) -> None:
    rules, problems = read(level)
    assert (rules.level, rules.explicit, problems) == (level, True, [])
    allowed = [other for other in LEVELS if rules.allows(other)]
    assert allowed == list(LEVELS[: LEVELS.index(rules.level) + 1])


def test_a_range_holds_at_both_ends() -> None:
    rules, problems = read(" budget:16-256 ")
    assert problems == []
    assert [rules.contains(k) for k in (15, 16, 256, 257)] == [False, True, True, False]
    assert str(rules) == "budget:16-256"
    assert read(str(rules))[0] == rules


@pytest.mark.parametrize(
    "value",
    ["all", "", "Budget", "budget:", "budget:16", "budget:16-", "budget:-3-8", "budget:1-2-3",
     "budget:a-b", "budget,states", True, 3, ["budget"], {"level": "budget"}, "budget:1-9999999"],
    ids=repr,
)  # fmt: skip
def test_invalid_values_are_reported_and_allow_nothing(value: object) -> None:
    rules, (problem,) = read(value)
    assert problem.where == "--autoprune-requests"
    assert "budget:16-256" in problem.fix
    assert not rules.allows("budget")


@pytest.mark.parametrize("value", ["budget:0-8", "budget:9-8", "states:1-65537"])
def test_invalid_range(value: str) -> None:
    _, (problem,) = read(value)
    assert "no range" in problem.what
