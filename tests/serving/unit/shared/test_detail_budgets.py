from __future__ import annotations

import pytest

from vllm_autoprune.errors import Problem
from vllm_autoprune.serving.shared.detail_budgets import DetailBudgets, parse_detail_budgets


def parsed(value: object) -> DetailBudgets:
    problems: list[Problem] = []
    budgets = parse_detail_budgets(value, problems)
    assert problems == []
    return budgets


def problems_of(value: object) -> list[str]:
    problems: list[Problem] = []
    parse_detail_budgets(value, problems)
    assert all(p.where == "--autoprune-detail" and p.fix for p in problems)
    return [p.what for p in problems]


@pytest.mark.parametrize(
    "value",
    [
        "low=64,high=256",
        " high = 256 , low = 64 ",
        {"low": 64, "high": 256},
        {"low": "64", "high": "256"},
    ],
    ids=repr,
)
def test_text_and_mapping(value: object) -> None:
    assert parsed(value) == DetailBudgets(64, 256)


def test_either_level_may_be_left_out() -> None:
    assert parsed(None) == DetailBudgets()
    assert parsed("low=64") == DetailBudgets(low=64)
    assert parsed({"high": 64}) == DetailBudgets(high=64)
    assert parsed("low=64,high=64") == DetailBudgets(64, 64)


def test_budget_of_a_detail() -> None:
    both, one = DetailBudgets(64, 256), DetailBudgets(low=64)
    assert [both.budget(detail) for detail in ("low", "high", None)] == [64, 256, None]
    assert [one.budget(detail) for detail in ("low", "high", None)] == [64, None, None]
    assert (both.largest, one.largest, DetailBudgets().largest) == (256, 64, 0)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("auto=64", "'auto' is no level"),
        ("64", "'64' is no level"),
        ("", "'' is no level"),
        ("low=64,", "'' is no level"),
        (64, "'64' is no level"),
        (["low=64"], "is no level"),
        ({1: 64}, "'1' is no level"),
        ({}, "gives no budget"),
        ("low", "low = '' is not a number of tokens"),
        ("low=0", "low = '0' is not"),
        ("low=-3", "low = '-3' is not"),
        ("low=6.5", "low = '6.5' is not"),
        ({"low": True}, "low = 'True' is not"),
        ({"low": None}, "low = 'None' is not"),
        ("low=4,low=8", "low is given twice"),
        ("low=8,high=4", "low = 8 keeps more tokens than high = 4"),
    ],
    ids=repr,
)
def test_each_problem(value: object, what: str) -> None:
    (problem,) = problems_of(value)
    assert what in problem


def test_all_problems_are_reported_in_one_message() -> None:
    assert len(problems_of("low=x,medium=3,high=0")) == 3
