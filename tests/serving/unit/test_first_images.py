from __future__ import annotations

import pytest
import torch

from tests.tpdsl.samples import images, state
from vllm_autoprune import PruningPolicy, VisualTokens, materialize, refine
from vllm_autoprune.serving.first_images import FirstImages
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


def test_a_sound_state_is_looked_at_once_and_left_alone(
    policy: PruningPolicy, broken: pytest.MonkeyPatch
) -> None:
    broken.undo()
    first = FirstImages()
    assert first.vetted(policy, images()) is policy
    broken.setattr("vllm_autoprune.serving.first_images.safety_check", None)
    assert first.vetted(policy, images()) is policy
    assert first.unsafe == 0


def test_a_state_that_fails_serves_its_base_policy_from_then_on(
    policy: PruningPolicy, broken: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    first, tokens = FirstImages(), images()
    found = first.vetted(policy, tokens)
    expected = materialize(policy.state.without_exchange(), 8)
    assert torch.equal(refine(found, tokens).indices, refine(expected, tokens).indices)
    broken.undo()
    assert first.vetted(policy, tokens) == found
    assert first.unsafe == 1
    (record,) = logged.records
    assert record.levelname == "ERROR"
    said = record.getMessage()
    assert "FAILS" in said and "made to fail" in said and "cdpruner" in said


def test_budgets_of_a_failed_state_stay_what_they_are(
    policy: PruningPolicy, broken: pytest.MonkeyPatch
) -> None:
    first, tokens = FirstImages(), images()
    first.vetted(policy, tokens)
    other = first.vetted(materialize(policy.state, 5), tokens)
    assert refine(other, tokens).indices.shape == (2, 5)


def test_images_that_are_no_numbers_condemn_no_state(
    policy: PruningPolicy, logged: pytest.LogCaptureFixture
) -> None:
    first, tokens = FirstImages(), images()
    spoilt = VisualTokens(
        tokens.features * float("nan"), tokens.grid, tokens.cls_attention, tokens.instruction
    )
    assert first.vetted(policy, spoilt) is policy
    assert (first.unsafe, logged.records) == (0, [])
    assert first.vetted(policy, tokens) is policy
    assert first.unsafe == 0
