from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.serving.unit.batches import blind, images, parts
from tests.serving.unit.samples import served
from tests.tpdsl.samples import state
from vllm_autoprune import RequestError, load_state
from vllm_autoprune.serving.shared.detail_budgets import DetailBudgets
from vllm_autoprune.serving.shared.plan import Choice, ItemPlan
from vllm_autoprune.serving.shared.plan_rules import PlanRules
from vllm_autoprune.serving.shared.request_rules import LEVELS, RequestRules
from vllm_autoprune.serving.shared.state_codec import encode_state
from vllm_autoprune.serving.shared.text_tower import TextTower
from vllm_autoprune.serving.worker.batch import prune_images
from vllm_autoprune.serving.worker.fallbacks import FallbackReporter
from vllm_autoprune.serving.worker.plan_reader import PlanReader
from vllm_autoprune.serving.worker.region_selection import SelectionContext

WORDS = 100
OWN = encode_state(state({"/constraints/selector/q_e": 3}))
SHIPPED = encode_state(load_state("visionzip"))


def rules(level: Any = "states", most: int = 64, **more: Any) -> PlanRules:
    allowed = RequestRules(level, 1, most, explicit=True, **more)
    return PlanRules(dataclasses.replace(served(), rules=allowed), WORDS)


def plan(**more: Any) -> ItemPlan:
    return ItemPlan(**{"budget": 8, "key": (1, 2), "instruction": (3,), **more})


def refused(item_plan: ItemPlan, by: PlanRules, placeholders: int | None = None) -> str:
    with pytest.raises(RequestError) as caught:
        by.check(item_plan, item_plan.budget if placeholders is None else placeholders)
    assert "autoprune_plan" in str(caught.value)
    return str(caught.value)


def test_plans_of_the_api_server_are_allowed() -> None:
    for level in LEVELS:
        rules(level).check(plan(), 8)
    rules("budget").check(plan(budget=64, keep="random"), 64)
    rules("shipped-states").check(plan(state=SHIPPED), 8)
    rules("states").check(plan(state=OWN), 8)


@pytest.mark.parametrize(
    ("item_plan", "level", "message"),
    [
        (plan(profile=True), "states", "profiling"),
        (plan(budget=65), "states", "K = 65"),
        (plan(budget=9), "none", "K = 9"),
        (plan(keep="random"), "none", "keep = 'random'"),
        (plan(keep="resized"), "none", "keep = 'resized'"),
        (plan(keep="resized", part="core", core=8), "budget", "an image that is resized"),
        (plan(instruction=(WORDS,)), "none", "vocabulary of 100"),
        (plan(language=(2**40,)), "none", "vocabulary of 100"),
        (plan(state=SHIPPED), "budget", "they may set budget"),
        (plan(state=OWN), "shipped-states", "does not ship"),
        (plan(state=b"{}"), "states", "cannot be served"),
        (plan(state=b"\xff" * 9), "states", "cannot be served"),
        (plan(state=OWN + b" "), "states", "canonical"),
        (plan(state=encode_state(load_state("fastv"))), "states", "reads language"),
    ],
    ids=str,
)
def test_a_forged_plan_is_refused(item_plan: ItemPlan, level: Any, message: str) -> None:
    by = rules(level)
    if "reads" in message:
        lacking = dataclasses.replace(by.served, unavailable=(("language", "not here"),))
        by = PlanRules(lacking, WORDS)
    assert message in refused(item_plan, by)


@pytest.mark.parametrize("level", LEVELS)
def test_plans_may_keep_the_largest_budget_of_a_detail(level: Any) -> None:
    by = rules(level, 10, detail=DetailBudgets(low=4, high=10))
    for budget in (4, 8, 10):
        by.check(plan(budget=budget), budget)
    assert "K = 11" in refused(plan(budget=11), by)


def recall(budget: int = 8, first: int = 8, **more: Any) -> ItemPlan:
    return plan(budget=budget, part="recall", earlier=(Choice(first), Choice(4)), **more)


def test_plans_may_recall_what_the_server_or_its_requests_may() -> None:
    rules("budget").check(recall(64), 64)
    assert "recalls 65" in refused(recall(65), rules())
    assert "keeps K = 65" in refused(recall(first=65), rules())
    rules("none", recall=8).check(recall(8), 8)
    assert "recalls 9 tokens, and requests may recall 8" in refused(
        recall(9), rules("none", recall=8)
    )
    assert "core" in refused(recall(core=4), rules()), "the state has none"


def test_token_ids_of_earlier_questions_are_checked_and_never_looked_up() -> None:
    for ids in ({"instruction": (WORDS,)}, {"language": (WORDS,)}):
        forged = dataclasses.replace(recall(), earlier=(Choice(8), Choice(4, **ids)))
        assert "beyond the vocabulary" in refused(forged, rules())
        result, reporter = read(forged.encode(), rules())
        assert result.earlier == (Choice(8), Choice(4))
        assert reporter.meter.errors == {"RequestError": 1}


def test_a_plan_has_as_many_rows_as_the_prompt_has_room_for() -> None:
    assert "8 tokens for 32 placeholders" in refused(plan(), rules(), 32)


def test_too_expensive_state_is_refused() -> None:
    assert "--autoprune-request-cost" in refused(plan(state=OWN), rules(cost=1.0))


def test_text_tower_has_its_own_vocabulary() -> None:
    tower = TextTower("some/clip", 1, "because", 77, 768, 1024, vocabulary=10)
    by = PlanRules(dataclasses.replace(served(), tower=tower), WORDS)
    by.check(plan(instruction=(9,), language=(99,)), 8)
    assert "vocabulary of 10" in refused(plan(instruction=(10,)), by)


def read(row: object, by: PlanRules) -> tuple[ItemPlan, FallbackReporter]:
    reporter = FallbackReporter()
    (result,) = PlanReader(by, reporter, torch.device("cpu")).read([row])
    return result, reporter


def test_worker_keeps_valid_plans() -> None:
    for item_plan in (plan(), plan(state=OWN), plan(keep="random"), plan(budget=8, profile=True)):
        result, reporter = read(item_plan.encode(), rules())
        assert result == item_plan
        assert reporter.meter.errors == {}


def test_worker_replaces_invalid_plans() -> None:
    result, reporter = read(plan(state=OWN).encode(), rules("budget"))
    assert (result.state, result.keep, result.budget) == (b"", "state", 8)
    assert reporter.meter.errors == {"RequestError": 1}
    assert reporter.meter.counts_on_host()["reference", "plan"] == 1
    result, _ = read(plan(instruction=(WORDS,), language=(WORDS,)).encode(), rules())
    assert (result.instruction, result.language) == ((), ())
    result, _ = read(plan(keep="random").encode(), rules("none"))
    assert result.keep == "state"
    for junk in (None, torch.zeros(3), torch.full((20,), -1), "no plan", [1, 2]):
        result, reporter = read(junk, rules())
        assert (result.budget, result.keep, result.state) == (8, "reference", b"")
        assert sum(reporter.meter.errors.values()) == 1


def test_plan_with_impossible_budget_keeps_its_number_of_rows() -> None:
    strict = PlanRules(served({"/constraints/selector/r_min": 8}), WORDS)
    result, reporter = read(plan(budget=4).encode(), strict)
    assert (result.budget, result.keep, reporter.meter.errors) == (4, "reference", {})
    limited = PlanRules(served({"/budget/limit": 32}), WORDS)
    assert read(plan(budget=33).encode(), limited)[0].keep == "random"


def test_every_decoded_plan_can_be_executed() -> None:
    source = torch.Generator().manual_seed(0)
    rows = [
        torch.randint(-3, 12, (length,), generator=source) for length in range(60) for _ in range(9)
    ]
    sound = plan(state=OWN, language=(4, 5)).encode()
    for place in range(len(sound)):
        for value in (-(2**63), -1, 0, 1, 7, 35, 36, 2**31, 2**63 - 1):
            rows.append(sound.index_fill(0, torch.tensor([place]), value))
    own = dataclasses.replace(blind(), rules=RequestRules("states"))
    reporter = FallbackReporter()
    plans = PlanReader(PlanRules(own, WORDS), reporter, torch.device("cpu")).read(rows)
    kept = [one for one in plans if not one.profile and one.budget <= 36]
    assert len(kept) > 400
    for one in kept:
        (row,) = prune_images(SelectionContext(own, parts(), reporter), [one], images(1))
        assert row.shape[0] == one.budget
