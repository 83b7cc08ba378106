"""Selections compared between the host and a device; here the host is both."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager

import pytest
import torch

from vllm_autoprune.selftest import device as under_test
from vllm_autoprune.selftest.device import WAITING, check_kernel, check_selections
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, PolicyParams, ReferenceSelection
from vllm_autoprune.tpdsl.loading import load_state, shipped_states
from vllm_autoprune.tpdsl.tokens import VisualTokens

CPU = torch.device("cpu")


def test_every_base_policy_and_shipped_state_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "ROUNDS", 1)
    results = list(check_selections(CPU))
    assert {result.name for result in results} == {*BASE_POLICIES, *shipped_states()}
    assert [result for result in results if result.wrong] == []
    assert all(result.share == 1 and result.seconds > 0 for result in results)


def test_a_device_that_keeps_other_tokens_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "ROUNDS", 1)
    calls = iter(range(10_000))

    def different(params: PolicyParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
        start = 0 if next(calls) == 0 else tokens.count - budget
        return ReferenceSelection(torch.arange(start, start + budget).expand(tokens.batch, -1))

    def failing(params: PolicyParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
        raise RuntimeError("called a synchronizing CUDA operation")

    broken = {"cdpruner": different, "divprune": failing}
    for name, function in broken.items():
        policy = dataclasses.replace(BASE_POLICIES[name], function=function)
        monkeypatch.setitem(BASE_POLICIES, name, policy)
    wrong = {result.name: result.wrong for result in check_selections(CPU)}
    assert "of the host's tokens are kept" in wrong["cdpruner"]
    assert wrong["divprune"] == "RuntimeError: called a synchronizing CUDA operation"
    assert wrong["trim"] == ""


def test_only_a_policy_that_has_to_wait_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert frozenset(BASE_POLICIES) >= WAITING

    def forbid(device: torch.device) -> AbstractContextManager[None]:
        raise RuntimeError("waits")

    monkeypatch.setattr(under_test, "_forbid_waiting", forbid)
    free = {result.name for result in check_selections(CPU) if not result.wrong}
    upon = {name: load_state(name).base_policy.name for name in shipped_states()}
    assert free == WAITING | {name for name, base in upon.items() if base in WAITING}


def test_the_kernel_needs_a_gpu() -> None:
    assert check_kernel(CPU) == "runs on a GPU only"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_selections_on_a_gpu() -> None:
    assert check_kernel(torch.device("cuda")) == ""
    assert [r for r in check_selections(torch.device("cuda")) if r.wrong] == []
