"""Invariants 2 and 4: K >= N is stock vLLM, and how a prompt is processed changes nothing."""

from __future__ import annotations

import pytest

from tests.serving.scenarios import V2, Report, run

pytestmark = pytest.mark.engine


def test_without_a_state_the_plugin_changes_no_bit() -> None:
    inert = run("plain")
    absent = run("plain", {"VLLM_AUTOPRUNE_DISABLE": "1"})
    assert inert == absent


def test_keeping_every_token_changes_no_bit() -> None:
    """Text, exact log-probabilities, prompt tokens and prefix-cache hits."""
    assert run("everything_kept") == run("plain")


def _kept(report: Report) -> set[str]:
    return {str(entry) for entry in report["kept"]}


@pytest.mark.parametrize("other", ["chunked_prefill", "no_caches"])
def test_prefill_and_caches_do_not_change_what_is_kept(other: str) -> None:
    whole, changed = run("whole_prefill"), run(other)
    assert _kept(changed) == _kept(whole)
    for one, two in zip(whole["answers"], changed["answers"], strict=True):
        assert one["text"] == two["text"]
        assert one["logprob"] == pytest.approx(two["logprob"], abs=2e-2)
        assert one["prompt_tokens"] == two["prompt_tokens"]


def test_model_runner_v2_keeps_what_v1_keeps() -> None:
    """By Triton's interpreter, on the trained model; all tokens kept is stock there too."""
    assert run("everything_kept", V2) == run("plain", V2)
    first, second = run("whole_prefill"), run("whole_prefill", V2)
    assert _kept(second) == _kept(first)
    for one, two in zip(first["answers"], second["answers"], strict=True):
        assert one["text"] == two["text"]
        assert one["logprob"] == pytest.approx(two["logprob"], abs=2e-2)
        assert one["prompt_tokens"] == two["prompt_tokens"]
