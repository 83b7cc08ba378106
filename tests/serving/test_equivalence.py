"""Invariants 2 and 4: K >= N equals stock vLLM; chunked prefill and caches change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.conftest import V2_EXHAUSTIVE
from tests.serving.runners import Runner

pytestmark = [
    pytest.mark.engine,
    pytest.mark.both,
    pytest.mark.scenarios(
        "plain", "everything_kept", "whole_prefill", "chunked_prefill", "no_caches"
    ),
]


@pytest.mark.parametrize("runner", V2_EXHAUSTIVE, indirect=True)
def test_without_a_state_the_plugin_changes_no_bit(runner: Runner) -> None:
    inert = runner.run("plain")
    absent = runner.run("plain", {"VLLM_AUTOPRUNE_DISABLE": "1"})
    assert inert == absent


def test_keeping_every_token_changes_no_bit(runner: Runner) -> None:
    """Text, exact log-probabilities, prompt tokens and prefix-cache hits."""
    assert runner.run("everything_kept") == runner.run("plain")


def _kept(report: Any) -> set[str]:
    return {str(entry) for entry in report["kept"]}


@pytest.mark.parametrize("other", ["chunked_prefill", "no_caches"])
def test_prefill_and_caches_do_not_change_what_is_kept(runner: Runner, other: str) -> None:
    whole, changed = runner.run("whole_prefill"), runner.run(other)
    assert _kept(changed) == _kept(whole)
    for one, two in zip(whole["answers"], changed["answers"], strict=True):
        assert one["text"] == two["text"]
        assert one["logprob"] == pytest.approx(two["logprob"], abs=2e-2)
        assert one["prompt_tokens"] == two["prompt_tokens"]
