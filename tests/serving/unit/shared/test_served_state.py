from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from tests.serving.unit.samples import served
from vllm_autoprune.serving.shared.detail_budgets import DetailBudgets
from vllm_autoprune.serving.shared.request_rules import RequestRules
from vllm_autoprune.serving.shared.served_state import ServedState
from vllm_autoprune.serving.shared.text_tower import TextTower


def test_policies_of_a_served_state() -> None:
    served_state = served({"/constraints/selector/q_e": 2}, budget=8)
    assert (served_state.policy().budget, served_state.policy().quota) == (8, 2)
    assert (served_state.policy(16).budget, served_state.policy(16).quota) == (16, 2)
    assert served_state.policy(16, "reference").quota == 0
    assert served_state.policy(16) is served_state.policy(16)


def test_needs_are_those_of_every_budget_a_request_may_ask_for() -> None:
    """r_min = K leaves nothing to exchange at the default budget, but at a larger one."""
    fixed = served({"/base_policy": {"name": "divprune"}, "/constraints/selector/r_min": 8})
    assert fixed.policy().needs == frozenset()
    assert fixed.needs == fixed.policy(16).needs == {"cls_attention", "instruction"}


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_served_state_survives_pickling_and_copying(how: str) -> None:
    tower = TextTower("some/clip", 1, "because", 77, 768, 1024)
    sent = served({"/base_policy": {"name": "divprune"}}, 16, tower, cache_bytes=5)
    rules = RequestRules("states", 8, 64, explicit=True, detail=DetailBudgets(8, 64))
    sent = dataclasses.replace(sent, rules=rules, unavailable=(("language", "because"),))
    received = pickle.loads(pickle.dumps(sent)) if how == "pickle" else copy.deepcopy(sent)
    assert isinstance(received, ServedState)
    assert received.state.digest == sent.state.digest
    assert received.policy() == sent.policy()
    assert received.policy(8, "reference") == sent.policy(8, "reference")
    assert (received.budget, received.tower, received.cache_bytes) == (16, tower, 5)
    assert (received.rules, received.unavailable) == (rules, sent.unavailable)
