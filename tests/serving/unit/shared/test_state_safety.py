from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from tests.serving.unit.samples import refusal, vllm_config
from tests.tpdsl.samples import edited, sample, state
from vllm_autoprune import PruningPolicy, SafetyRecord, VisualTokens
from vllm_autoprune.serving.shared import state_safety
from vllm_autoprune.serving.startup.config import resolve_settings
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, BasePolicyParams, ReferenceSelection

DIVPRUNE: dict[str, object] = {"/base_policy": {"name": "divprune"}}
CHECKS = ["preserve_budget", "no_shape_change", "deterministic"]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A base policy that repeats a token."""
    sound = BASE_POLICIES["divprune"]

    def repeats(params: BasePolicyParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
        picks = sound.select(params, tokens, budget).picks
        return ReferenceSelection(torch.cat([picks[:, :1], picks[:, :-1]], dim=1))

    monkeypatch.setitem(BASE_POLICIES, "divprune", dataclasses.replace(sound, function=repeats))


@pytest.mark.usefixtures("broken")
def test_unsafe_state_is_replaced_by_its_base_policy(
    logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_safety, "_warnings", itertools.count(1))
    data = edited(sample(), DIVPRUNE)
    served_state = resolve_settings({"state": data}, vllm_config())
    assert not served_state.policy().refines
    assert served_state.state.digest == state(DIVPRUNE).without_exchange().digest
    (record,) = logged.records
    assert record.levelname == "WARNING"
    assert "valid_indices" in record.getMessage()


@pytest.mark.usefixtures("broken")
def test_unsafe_state_without_fallback_is_refused() -> None:
    data = edited(sample(), {**DIVPRUNE, "/safety": CHECKS})
    (problem,) = refusal({"state": data})
    assert problem.where == "state#/safety"
    assert "valid_indices" in problem.what
    assert "fallback_to_selection" in problem.fix


def test_safe_state_is_served(logged: pytest.LogCaptureFixture) -> None:
    for changes in ({}, {"/safety": CHECKS}):
        served_state = resolve_settings(
            {"state": edited(sample(), {**DIVPRUNE, **changes})}, vllm_config()
        )
        assert served_state.policy().refines
    assert logged.records == []


def test_a_state_is_checked_at_its_own_budget_up_to_the_largest_quota(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[int] = []

    def noted(policy: PruningPolicy) -> SafetyRecord:
        checked.append(policy.budget)
        return SafetyRecord(())

    monkeypatch.setattr("vllm_autoprune.serving.shared.state_safety.safety_check", noted)
    for budget in (16, 320, 4096):
        resolve_settings({"state": "autoprune", "budget": budget}, vllm_config())
    large = {"/budget/atom": "fixed_budget@512", "/constraints/selector/r_min": 512}
    data = edited(sample(), large)
    resolve_settings({"state": data, "budget": 4096}, vllm_config())
    assert checked == [16, 320, 640, 640]
