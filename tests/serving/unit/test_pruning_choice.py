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
    read_settings,
)

N = 144
DETAIL = DetailBudgets(low=4, high=32)


def server(level: Any = "states", least: int = 1, most: int = 65536, **more: Any) -> ServedState:
    detail = more.pop("detail", DetailBudgets())
    rules = RequestRules(level, least, most, detail=detail)
    return dataclasses.replace(served(), rules=rules, **more)


def chosen(asked: object, *sizes: int, on: ServedState | None = None) -> tuple[ImageChoice, ...]:
    images = [TokenCount(size) for size in sizes or (N,)]
    return resolve_choices(on or server(), parse_request(asked), images)


def kept(asked: object, *sizes: int, on: ServedState | None = None) -> list[int]:
    return [choice.kept for choice in chosen(asked, *sizes, on=on)]


def refused(asked: object, *sizes: int, on: ServedState | None = None) -> str:
    with pytest.raises((RequestError, BudgetError)) as caught:
        chosen(asked, *sizes, on=on)
    return str(caught.value)


# ---- budgets ----


@pytest.mark.parametrize("level", LEVELS)
def test_a_request_without_fields_runs_the_server_state(level: Any) -> None:
    large, small = chosen(None, N, 5, on=server(level))
    assert (large.kept, large.keep, large.state) == (8, "state", b"")
    assert large.identity == served().state.digest
    assert small == ImageChoice(5, 5, "state")


def test_a_budget_for_each_or_for_all() -> None:
    assert kept({"budget": 16}, N, N) == [16, 16]
    assert kept({"budget": [16, 4]}, N, N) == [16, 4]
    assert kept({"budget": {"shared": 33}}, N, N) == [17, 16]
    assert kept({"budget": {"shared": 33}}, 10, N) == [10, 23]
    assert kept({"budget": 4096}, N) == [N]


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


def test_a_range_bounds_every_way_to_ask() -> None:
    bounded = server(least=8, most=64)
    for asked in (
        {"budget": 7},
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


def test_only_the_end_of_the_range_bounds_what_is_recalled() -> None:
    """The least K of an image is no bound on what later turns add to it."""
    narrow = server("budget", 16, 64)
    for recall in (0, 1, 64):
        chosen({"recall": recall}, on=narrow)
    assert "K_r = 65, and requests may recall 64" in refused({"recall": 65}, on=narrow)
    chosen({"recall": 0}, on=server("none"))


def test_a_budget_that_follows_the_tiles() -> None:
    tiled = edited(sample(), {"/budget": {"atom": "per_tile_budget", "k": 10}})
    images = [TokenCount(N, tiles=3), TokenCount(N, tiles=1)]
    request = parse_request({"state": tiled})
    assert [c.kept for c in resolve_choices(server(), request, images)] == [30, 10]
    with pytest.raises(RequestError, match="K = 30"):
        resolve_choices(server(most=20), request, images)


# ---- budgets by ``image_url.detail`` ----


@pytest.mark.parametrize("level", LEVELS)
def test_detail_sets_the_budget_of_each_image_at_every_level(level: Any) -> None:
    asked = {"details": ["low", None, "high", "high"]}
    assert kept(asked, N, N, N, 20, on=server(level, detail=DETAIL)) == [4, 8, 32, 20]
    low, high = chosen({"details": ["low", "high"]}, N, N, on=server(level, detail=DETAIL))
    assert (low.state, low.keep, low.identity) == (b"", "state", served().state.digest)
    assert high.identity == low.identity


def test_detail_counts_only_where_the_operator_gave_it_and_the_request_sets_nothing() -> None:
    details = {"details": ["low", "high"]}
    assert chosen(details, N, N) == chosen(None, N, N)
    assert kept(details, N, N, on=server(detail=DetailBudgets(low=4))) == [4, 8]
    choice = server(detail=DETAIL)
    for budget, expected in ((16, [16, 16]), ([2, 3], [2, 3]), ({"shared": 9}, [5, 4])):
        assert kept({**details, "budget": budget}, N, N, on=choice) == expected
    assert kept({**details, "enabled": False}, N, N, on=choice) == [N, N]
    largest = load_state("visionzip").budget.range()[1]
    asked = {"state": "visionzip", "details": ["low", None]}
    assert kept(asked, N, N, on=choice) == [4, min(largest, N)]


def test_the_range_of_requests_does_not_bound_detail() -> None:
    """The operator gave both; start-up has checked the budgets against the end of the range."""
    bounded = server(least=16, most=64, detail=DETAIL)
    assert kept({"details": ["low"]}, on=bounded) == [4]
    assert kept({"details": ["low"], "state": "visionzip"}, on=bounded) == [4]
    assert "K = 4" in refused({"details": ["low"], "budget": 4}, on=bounded)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("auto=64", ["'auto' is no level"]),
        ("", ["'' is no level"]),
        (64, ["'64' is no level"]),
        (["low=64"], ["is no level"]),
        ({1: 64}, ["'1' is no level"]),
        ({}, ["gives no budget"]),
        ("low", ["low = '' is not a number of tokens"]),
        ("low=0", ["low = '0' is not"]),
        ("low=6.5", ["low = '6.5' is not"]),
        ({"low": True}, ["low = 'True' is not"]),
        ("low=4,low=8", ["low is given twice"]),
        ("low=8,high=4", ["low = 8 keeps more tokens than high = 4"]),
        ("low=x,medium=3,high=0", ["low = 'x'", "'medium' is no level", "high = '0'"]),
    ],
    ids=repr,
)
def test_each_problem_of_a_detail(value: object, what: list[str]) -> None:
    _, problems = read_settings({"state": "autoprune", "detail": value})
    assert all(p.where == "--autoprune-detail" and p.fix for p in problems)
    assert len(problems) == len(what)
    assert all(any(text in p.what for p in problems) for text in what)


# ---- what requests may ask for ----


def test_a_policy_brings_its_state_its_budget_and_its_identity() -> None:
    (choice,) = chosen({"state": "visionzip"})
    state = load_state("visionzip")
    assert choice.kept == min(state.budget.range()[1], N)
    assert choice.identity == state.digest != chosen(None)[0].identity
    assert decode_state(choice.state).digest == state.digest
    (other,) = chosen({"state": "visionzip", "budget": 7})
    assert (other.kept, other.state) == (7, encode_state(state))


def test_needs_of_a_choice_are_those_of_its_policy() -> None:
    assert chosen(None)[0].reads_instruction
    assert not chosen({"state": "visionzip", "budget": 8})[0].reads_instruction
    assert chosen({"state": "fastv", "budget": 8})[0].needs >= {"language"}
    for asked in ({"keep": "random"}, {"keep": "resized"}, {"budget": N}, {"enabled": False}):
        assert chosen(asked)[0].needs == frozenset()


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


def read(value: object) -> RequestRules:
    settings, problems = read_settings({"state": "autoprune", "requests": value})
    assert settings is not None, problems
    return settings.rules


def test_levels_are_cumulative_and_a_range_holds_at_both_ends() -> None:
    assert read(None) == RequestRules("budget", 1, 65536, explicit=False)
    for level in LEVELS:
        rules = read(level)
        assert (rules.level, rules.explicit) == (level, True)
        allowed = [other for other in LEVELS if rules.allows(other)]
        assert allowed == list(LEVELS[: LEVELS.index(rules.level) + 1])
    rules = read(" budget:16-256 ")
    assert [rules.contains(k) for k in (15, 16, 256, 257)] == [False, True, True, False]
    assert str(rules) == "budget:16-256"
    assert read(str(rules)) == rules


@pytest.mark.parametrize(
    "value",
    ["all", "", "Budget", "budget:", "budget:16", "budget:16-", "budget:-3-8", "budget:1-2-3",
     "budget:a-b", "budget,states", True, 3, ["budget"], {"level": "budget"}, "budget:1-9999999",
     "budget:0-8", "budget:9-8", "states:1-65537"],
    ids=repr,
)  # fmt: skip
def test_invalid_rules_are_reported(value: object) -> None:
    _, (problem,) = read_settings({"state": "autoprune", "requests": value})
    assert problem.where == "--autoprune-requests"
    assert problem.fix
