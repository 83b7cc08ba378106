from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.tpdsl.samples import images, state
from vllm_autoprune import PruningPolicy, VisualTokens, materialize, refine
from vllm_autoprune.ops.rowwise import evenly_spaced
from vllm_autoprune.serving.worker import selection as under_test
from vllm_autoprune.serving.worker.fallbacks import FallbackReporter
from vllm_autoprune.serving.worker.selection import select_at_random, select_with_fallback
from vllm_autoprune.tpdsl.executor.refine import keep_reference


@pytest.fixture
def policy() -> PruningPolicy:
    return materialize(state(), 8)


def failing(*names: str) -> Any:
    def fail(*_: object) -> Any:
        raise RuntimeError(f"broken: {names}")

    return fail


def test_valid_policy_equals_refine(policy: PruningPolicy) -> None:
    reporter, tokens = FallbackReporter(), images()
    result, expected = select_with_fallback(policy, tokens, reporter), refine(policy, tokens)
    assert torch.equal(result.indices, expected.indices)
    assert torch.equal(result.features, expected.features)
    assert reporter.meter.counts() == {"none": 2, "reference": 0, "uniform": 0}
    assert reporter.meter.errors == {}


def test_features_with_gradients_are_no_failure(policy: PruningPolicy) -> None:
    """vLLM's warm-up on a CPU passes tensors that require gradients."""
    reporter, tokens = FallbackReporter(), images()
    tracked = dataclasses.replace(tokens, features=tokens.features.clone().requires_grad_())
    result = select_with_fallback(policy, tracked, reporter)
    assert reporter.meter.errors == {} and reporter.meter.counts()["none"] == 2
    assert torch.equal(
        result.indices, select_with_fallback(policy, tokens, FallbackReporter()).indices
    )
    assert not result.features.requires_grad


def test_exception_falls_back_to_the_reference(
    policy: PruningPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter, tokens = FallbackReporter(), images()
    monkeypatch.setattr(under_test, "select_tokens", failing("refine"))
    result = select_with_fallback(policy, tokens, reporter)
    assert torch.equal(result.indices, keep_reference(policy, tokens).indices)
    assert reporter.meter.counts() == {"none": 0, "reference": 2, "uniform": 0}
    assert reporter.meter.errors == {"RuntimeError": 1}


def test_failing_base_policy_gives_evenly_spaced_tokens(
    policy: PruningPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter, tokens = FallbackReporter(), images()
    monkeypatch.setattr(under_test, "select_tokens", failing("refine"))
    monkeypatch.setattr(under_test, "keep_reference", failing("base"))
    result = select_with_fallback(policy, tokens, reporter)
    assert torch.equal(result.indices, evenly_spaced(2, tokens.count, 8, tokens.features.device))
    assert reporter.meter.counts() == {"none": 0, "reference": 0, "uniform": 2}
    assert reporter.meter.errors == {"RuntimeError": 2}


def test_missing_input_falls_back() -> None:
    """The worker made no instruction for a state that reads one."""
    policy = materialize(state({"/base_policy": {"name": "divprune"}}), 8)
    reporter, tokens = FallbackReporter(), images()
    result = select_with_fallback(policy, VisualTokens(tokens.features, tokens.grid), reporter)
    assert result.indices.shape == (2, 8)
    assert reporter.meter.errors == {"SelectionError": 1}
    assert reporter.meter.counts()["reference"] == 2


def test_an_interrupt_is_not_swallowed(
    policy: PruningPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(under_test, "select_tokens", stopped)
    with pytest.raises(KeyboardInterrupt):
        select_with_fallback(policy, images(), FallbackReporter())


def test_non_finite_images_are_counted(policy: PruningPolicy) -> None:
    tokens = images(batch=3)
    tokens.features[1, 5] = torch.nan
    reporter = FallbackReporter()
    select_with_fallback(policy, tokens, reporter)
    select_with_fallback(policy, tokens, reporter)
    assert reporter.meter.counts() == {"none": 4, "reference": 0, "uniform": 2}


def test_meter_adds_up_and_each_kind_is_logged_once(logged: pytest.LogCaptureFixture) -> None:
    reporter = FallbackReporter()
    assert reporter.meter.counts() == {"none": 0, "reference": 0, "uniform": 0}
    for codes in ([0, 0], [1, 0], [1, 1], [0], [2], [2], [1], [0]):
        reporter.report(torch.tensor(codes, dtype=torch.uint8))
    assert reporter.meter.counts() == {"none": 5, "reference": 4, "uniform": 2}
    messages = [record.getMessage() for record in logged.records]
    assert [("reference" in line, "uniform" in line) for line in messages] == [
        (True, False),
        (False, True),
    ]


def test_no_log_without_fallbacks(logged: pytest.LogCaptureFixture) -> None:
    reporter = FallbackReporter()
    for _ in range(3):
        reporter.report(torch.zeros(4, dtype=torch.uint8))
    assert logged.records == []


def test_errors_are_logged_once_a_type_with_their_traceback(
    logged: pytest.LogCaptureFixture,
) -> None:
    reporter = FallbackReporter()
    for error in (ValueError("a"), ValueError("b"), KeyError("c")):
        reporter.report_error(error)
    assert reporter.meter.errors == {"ValueError": 2, "KeyError": 1}
    assert [r.exc_info[0] for r in logged.records if r.exc_info] == [ValueError, KeyError]


def test_a_random_keep_is_untouched_tokens_in_raster_order() -> None:
    tokens = images(batch=3)
    result = select_at_random(8, tokens, [(1, 0), (2, 0), (1, 9)])
    assert (result.indices.diff(dim=1) > 0).all()
    rows = [tokens.features[b][result.indices[b]] for b in range(3)]
    assert torch.equal(result.features, torch.stack(rows))
    assert torch.equal(result.indices[0], result.indices[2])
    assert not torch.equal(result.indices[0], result.indices[1])
    assert (result.fallback == 0).all()
