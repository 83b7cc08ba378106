from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.tpdsl.samples import images, state
from vllm_autoprune import Grid, PruningPolicy, VisualTokens, materialize, refine
from vllm_autoprune.serving.worker import first_image_check
from vllm_autoprune.serving.worker.first_image_check import FirstImageCheck
from vllm_autoprune.tpdsl.atoms.safety import SafetyRecord, Verdict
from vllm_autoprune.tpdsl.executor import check
from vllm_autoprune.tpdsl.executor import refine as executor


@pytest.fixture
def policy() -> PruningPolicy:
    return materialize(state({"/constraints/selector/q_e": 4}), 8)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("made to fail")

    monkeypatch.setattr(executor, "run_fusion", fails)
    return monkeypatch


def test_safe_state_is_checked_once(policy: PruningPolicy, broken: pytest.MonkeyPatch) -> None:
    broken.undo()
    first = FirstImageCheck()
    assert first.replace_unsafe(policy, images()) is policy
    broken.setattr("vllm_autoprune.serving.worker.first_image_check.safety_check", None)
    assert first.replace_unsafe(policy, images()) is policy
    assert first.unsafe == 0


def test_unsafe_state_is_replaced_by_its_base_policy(
    policy: PruningPolicy, broken: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    first, tokens = FirstImageCheck(), images()
    replacement = first.replace_unsafe(policy, tokens)
    expected = materialize(policy.state.without_exchange(), 8)
    assert torch.equal(refine(replacement, tokens).indices, refine(expected, tokens).indices)
    broken.undo()
    assert first.replace_unsafe(policy, tokens) == replacement
    assert first.unsafe == 1
    (record,) = logged.records
    assert record.levelname == "ERROR"
    message = record.getMessage()
    assert "FAILS" in message and "made to fail" in message and "cdpruner" in message


def test_replacement_keeps_the_budget(policy: PruningPolicy, broken: pytest.MonkeyPatch) -> None:
    first, tokens = FirstImageCheck(), images()
    first.replace_unsafe(policy, tokens)
    other = first.replace_unsafe(materialize(policy.state, 5), tokens)
    assert refine(other, tokens).indices.shape == (2, 5)


def test_non_finite_images_fail_no_state(
    policy: PruningPolicy, logged: pytest.LogCaptureFixture
) -> None:
    first, tokens = FirstImageCheck(), images()
    spoilt = VisualTokens(
        tokens.features * float("nan"), tokens.grid, tokens.cls_attention, tokens.instruction
    )
    assert first.replace_unsafe(policy, spoilt) is policy
    assert (first.unsafe, logged.records) == (0, [])
    assert first.replace_unsafe(policy, tokens) is policy
    assert first.unsafe == 0


def fails_at(monkeypatch: pytest.MonkeyPatch, budget: int) -> list[int]:
    """Make every state fail its safety check at one budget; return the list of checked budgets."""
    checked: list[int] = []
    stock = check.safety_check

    def at_one_budget(policy: PruningPolicy, probes: list[VisualTokens]) -> SafetyRecord:
        checked.append(policy.budget)
        if policy.budget == budget:
            return SafetyRecord((Verdict("shapes", False, "made to fail"),))
        return stock(policy, probes)

    monkeypatch.setattr(first_image_check, "safety_check", at_one_budget)
    return checked


@pytest.mark.parametrize("budgets", [(8, 5), (5, 8)])
def test_verdict_applies_to_one_budget(
    policy: PruningPolicy, monkeypatch: pytest.MonkeyPatch, budgets: tuple[int, int]
) -> None:
    """In either order, the verdict at one budget does not affect the other."""
    checked = fails_at(monkeypatch, 5)
    first, tokens = FirstImageCheck(), images()
    for _ in range(2):
        for budget in budgets:
            requested = materialize(policy.state, budget)
            replacement = first.replace_unsafe(requested, tokens)
            assert (replacement is requested) == (budget != 5)
            assert replacement.quota == (0 if budget == 5 else requested.quota)
    assert checked == list(budgets)
    assert first.unsafe == 1


def test_verdict_applies_to_one_number_of_tiles(
    policy: PruningPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = fails_at(monkeypatch, 0)
    first, whole = FirstImageCheck(), images()
    grid = whole.grid
    tiled = replace(whole, grid=Grid(grid.height // 2, grid.width, 2))
    for tokens in (whole, tiled, whole, tiled):
        first.replace_unsafe(policy, tokens)
    assert len(checked) == 2


def test_failing_state_is_logged_once(
    policy: PruningPolicy, broken: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    """Clients choose budgets: they must not be able to fill the log."""
    first, tokens = FirstImageCheck(), images()
    for budget in (5, 6, 7, 8):
        assert first.replace_unsafe(materialize(policy.state, budget), tokens).quota == 0
    assert first.unsafe == 1
    assert len(logged.records) == 1
