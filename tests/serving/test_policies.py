"""Every state in ``policies`` is served by vLLM with mini-LLaVA."""

from __future__ import annotations

import pytest

from tests.serving.paths import TOKENS
from tests.serving.runners import Runner
from tests.serving.scenarios import Report
from vllm_autoprune.tpdsl.loading import shipped_states

PATIENCE = 570.0

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def assert_served(report: Report, name: str) -> None:
    """K tokens at the state's own budget, no fallback and no error.

    The prompt is shorter than a stock engine's by N - K tokens of the N = 144 that this model has.
    A state that keeps all 144 is also run at 72. Correctness of the answer is not checked.
    """
    served, full = report["states"][name], report["full"]
    assert "error" not in served, served["error"]
    assert min(map(int, served["answers"])) < TOKENS
    for kept, answer in served["answers"].items():
        assert answer["prompt_tokens"] == full["prompt_tokens"] - TOKENS + min(int(kept), TOKENS)
        assert answer["text"]
    assert served["errors"] == {}
    assert served["fallbacks"]["reference"] == served["fallbacks"]["uniform"] == 0
    assert served["fallbacks"]["none"] > 0


@pytest.mark.scenarios("shipped_by_request")
@pytest.mark.parametrize("name", shipped_states())
def test_a_request_may_name_a_shipped_state(name: str) -> None:
    assert_served(Runner("v1").run("shipped_by_request"), name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", shipped_states())
def test_a_shipped_state_serves_as_the_state_of_an_engine(name: str) -> None:
    assert_served(Runner("v1").run("shipped", patience=PATIENCE), name)
