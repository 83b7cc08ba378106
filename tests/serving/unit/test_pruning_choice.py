"""Which K, state and control an image of a request gets under the rules of its server."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.unit.samples import served
from tests.tpdsl.samples import edited, sample
from vllm_autoprune import BudgetError, RequestError, load_state
from vllm_autoprune.errors import Problem
from vllm_autoprune.serving.api.choices import (
    ImageChoice,
    TokenCount,
    resolve_choices,
    split_shared_budget,
)
from vllm_autoprune.serving.api.request import parse_request
from vllm_autoprune.serving.plan import decode_state, encode_state
from vllm_autoprune.serving.served_state import NEEDS, ServedState
from vllm_autoprune.serving.settings import (
    LEVELS,
    DetailBudgets,
    RequestRules,
    parse_detail_budgets,
    parse_rules,
)

N = 144


def server(level: Any = "states", least: int = 1, most: int = 65536, **more: Any) -> ServedState:
    return dataclasses.replace(served(), rules=RequestRules(level, least, most), **more)


def chosen(asked: object, *sizes: int, on: ServedState | None = None) -> tuple[ImageChoice, ...]:
    images = [TokenCount(size) for size in sizes or (N,)]
    return resolve_choices(on or server(), parse_request(asked), images)


def kept(asked: object, *sizes: int, on: ServedState | None = None) -> list[int]:
    return [choice.kept for choice in chosen(asked, *sizes, on=on)]


def refused(asked: object, *sizes: int, on: ServedState | None = None) -> str:
    with pytest.raises((RequestError, BudgetError)) as caught:
        chosen(asked, *sizes, on=on)
    return str(caught.value)


def test_a_request_without_fields_runs_the_server_state() -> None:
    for level in LEVELS:
        one, small = chosen(None, N, 5, on=server(level))
        assert (one.kept, one.keep, one.state) == (8, "state", b"")
        assert one.identity == served().state.digest
        assert small == ImageChoice(5, 5, "state")


def test_a_budget_for_each_or_for_all() -> None:
    assert kept({"budget": 16}, N, N) == [16, 16]
    assert kept({"budget": [16, 4]}, N, N) == [16, 4]
    assert kept({"budget": {"shared": 33}}, N, N) == [17, 16]
    assert kept({"budget": {"shared": 33}}, 10, N) == [10, 23]
    assert kept({"budget": 4096}, N) == [N]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"budget": [16]}, "1 budgets for 2 images"),
        ({"budget": [16, 8, 4]}, "3 budgets for 2 images"),
        ({"budget": {"shared": 1}}, "1 tokens for 2 images"),
        ({"budget": {"shared": -5}}, "-5 tokens"),
        ({"budget": 0}, "K = 0"),
        ({"budget": [8, -1]}, "K = -1"),
        ({"budget": 10**30}, f"and the image has N = {N} tokens -> give 1 to {N}"),
    ],
)
def test_budgets_that_cannot_be(asked: object, said: str) -> None:
    assert said in refused(asked, N, N)


DETAIL = DetailBudgets(low=4, high=32)


def with_detail(
    level: Any = "states", least: int = 1, most: int = 65536, detail: DetailBudgets = DETAIL
) -> ServedState:
    allowed = RequestRules(level, least, most, detail=detail)
    return dataclasses.replace(served(), rules=allowed)


@pytest.mark.parametrize("level", LEVELS)
def test_detail_sets_the_budget_of_each_image_at_every_level(level: Any) -> None:
    asked = {"details": ["low", None, "high", "high"]}
    assert kept(asked, N, N, N, 20, on=with_detail(level)) == [4, 8, 32, 20]
    low, high = chosen({"details": ["low", "high"]}, N, N, on=with_detail(level))
    assert (low.state, low.keep, low.identity) == (b"", "state", served().state.digest)
    assert high.identity == low.identity


def test_detail_without_a_budget_of_the_operator_changes_nothing() -> None:
    assert chosen({"details": ["low", "high"]}, N, N) == chosen(None, N, N)
    one = with_detail(detail=DetailBudgets(low=4))
    assert kept({"details": ["low", "high"]}, N, N, on=one) == [4, 8]


def test_what_a_request_sets_itself_outranks_detail() -> None:
    details = {"details": ["low", "high"]}
    for budget, expected in ((16, [16, 16]), ([2, 3], [2, 3]), ({"shared": 9}, [5, 4])):
        assert kept({**details, "budget": budget}, N, N, on=with_detail()) == expected
    assert kept({**details, "enabled": False}, N, N, on=with_detail()) == [N, N]


def test_a_state_of_a_request_has_the_budget_of_the_detail() -> None:
    asked = {"state": "visionzip", "details": ["low", None]}
    own = load_state("visionzip").budget.range()[1]
    assert kept(asked, N, N, on=with_detail()) == [4, min(own, N)]


def test_the_range_of_requests_does_not_bound_detail() -> None:
    """The operator gave both; start-up has checked the budgets against the end of the range."""
    bounded = with_detail(least=16, most=64)
    assert kept({"details": ["low"]}, on=bounded) == [4]
    assert kept({"details": ["low"], "state": "visionzip"}, on=bounded) == [4]
    assert "K = 4" in refused({"details": ["low"], "budget": 4}, on=bounded)


def test_as_many_details_as_images_or_none_count() -> None:
    for details in ([], ["low"], ["low"] * 3):
        assert kept({"details": details}, N, N, on=with_detail()) == [8, 8]


def test_only_the_end_of_the_range_bounds_what_is_recalled() -> None:
    """The least K of an image is no bound on what later turns add to it."""
    narrow = server("budget", 16, 64)
    for recall in (0, 1, 64):
        chosen({"recall": recall}, on=narrow)
    assert "K_r = 65, and requests may recall 64" in refused({"recall": 65}, on=narrow)
    assert "--autoprune-requests" in refused({"recall": 1}, on=server("none"))
    chosen({"recall": 0}, on=server("none"))


def test_a_range_bounds_every_way_to_ask() -> None:
    bounded = server(least=8, most=64)
    for asked in (
        {"budget": 7},
        {"budget": 65},
        {"budget": [64, 65]},
        {"budget": {"shared": 14}},
        {"budget": {"shared": 140}},
        {"enabled": False},
        {"state": edited(sample(), {"/budget": {"atom": "fixed_budget@128"}})},
    ):
        assert "8 to 64" in refused(asked, N, N, on=bounded)
    assert kept({"budget": [8, 64]}, N, N, on=bounded) == [8, 64]
    assert kept(None, N, N, on=server(least=16, most=64)) == [8, 8]
    assert kept({"state": "visionzip", "budget": 64}, on=bounded) == [64]


@pytest.mark.parametrize(
    ("asked", "least"),
    [
        ({"budget": 8}, "budget"),
        ({"keep": "random"}, "budget"),
        ({"enabled": False}, "budget"),
        ({"state": "visionzip"}, "shipped-states"),
        ({"state": sample()}, "states"),
    ],
    ids=str,
)
def test_each_field_belongs_to_a_level(asked: object, least: Any) -> None:
    for level in LEVELS:
        rules = RequestRules(level)
        if rules.allows(least):
            chosen(asked, on=server(level))
        else:
            said = refused(asked, on=server(level))
            assert f"--autoprune-requests {least}" in said


def test_a_budget_that_follows_the_tiles() -> None:
    tiled = edited(sample(), {"/budget": {"atom": "per_tile_budget", "k": 10}})
    images = [TokenCount(N, tiles=3), TokenCount(N, tiles=1)]
    request = parse_request({"state": tiled})
    assert [c.kept for c in resolve_choices(server(), request, images)] == [30, 10]
    with pytest.raises(RequestError, match="K = 30"):
        resolve_choices(server(most=20), request, images)


def test_no_pruning_is_what_stock_vllm_does() -> None:
    (choice,) = chosen({"enabled": False})
    assert choice.keeps_all
    assert (choice.kept, choice.needs, choice.state) == (N, frozenset(), b"")


@pytest.mark.parametrize(
    "more", [{"budget": 16}, {"budget": [16]}, {"state": "visionzip"}, {"keep": "random"}], ids=str
)
def test_no_pruning_and_a_way_to_prune_are_refused(more: dict[str, object]) -> None:
    said = refused({"enabled": False, **more})
    assert f"enabled: false keeps every token, but '{next(iter(more))}' is given as well" in said


def test_a_policy_brings_its_state_its_budget_and_its_identity() -> None:
    (own,) = chosen({"state": "visionzip"})
    state = load_state("visionzip")
    assert own.kept == min(state.budget.range()[1], N)
    assert own.identity == state.digest != chosen(None)[0].identity
    assert decode_state(own.state).digest == state.digest
    (other,) = chosen({"state": "visionzip", "budget": 7})
    assert (other.kept, other.state) == (7, encode_state(state))


def test_needs_of_a_choice_are_those_of_its_policy() -> None:
    assert chosen(None)[0].reads_instruction
    assert not chosen({"state": "visionzip", "budget": 8})[0].reads_instruction
    assert chosen({"state": "fastv", "budget": 8})[0].needs >= {"language"}
    for control in ("random", "resized"):
        assert chosen({"keep": control})[0].needs == frozenset()
    assert chosen({"budget": N})[0].needs == frozenset()


def test_a_server_that_brings_states_makes_all_it_can_and_refuses_the_rest() -> None:
    assert server("budget").needs == served().needs
    assert server("shipped-states").needs == set(NEEDS)
    poor = server(unavailable=(("language", "--enable-lora: because"),))
    assert poor.needs == set(NEEDS) - {"language"}
    said = refused({"state": "fastv", "budget": 8}, on=poor)
    assert "'language' (--enable-lora: because)" in said
    assert kept({"state": "visionzip", "budget": 8}, on=poor) == [8]
    # What keeps everything reads nothing.
    assert kept({"state": "fastv", "budget": N}, on=poor) == [N]


# ---- test_shared_budget ----


@pytest.mark.parametrize(
    ("total", "sizes", "budgets"),
    [
        (96, [576, 576], [48, 48]),
        (10, [576, 576, 576], [4, 3, 3]),
        (96, [10, 576, 576], [10, 43, 43]),
        (97, [576, 10, 576], [44, 10, 43]),
        (1000, [10, 20], [10, 20]),
        (2, [1, 1], [1, 1]),
        (5, [576], [5]),
    ],
)
def test_even_shares_with_the_surplus_given_to_the_others(
    total: int, sizes: list[int], budgets: list[int]
) -> None:
    assert split_shared_budget(total, sizes) == budgets


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.integers(1, 5000))
def test_shares_sum_to_the_total_and_never_exceed_what_each_has(
    sizes: list[int], total: int
) -> None:
    budgets = split_shared_budget(total, sizes)
    assert sum(budgets) == min(total, sum(sizes))
    assert all(0 <= budget <= size for budget, size in zip(budgets, sizes, strict=True))
    if total >= len(sizes):
        assert min(budgets) >= 1
    # An image that could take more has at least what any other has, but for the remainder.
    open_ = [b for b, size in zip(budgets, sizes, strict=True) if b < size]
    assert all(max(budgets) - b <= 1 for b in open_)


# ---- test_detail_budgets ----


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


# ---- test_request_rules ----


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
