"""Every state in ``policies`` is served by vLLM with mini-LLaVA."""

from __future__ import annotations

import pytest

from tests.serving.paths import TOKENS
from tests.serving.scenarios import run
from vllm_autoprune.tpdsl.load import shipped_states

PATIENCE = 570.0

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", shipped_states())
def test_a_shipped_state_serves(name: str) -> None:
    """An engine of its own starts with the state and answers one question about one image.

    At the state's own K, the prompt is shorter than a stock engine's by N - K tokens of the N =
    144 that this model has; no image fell back, nothing was raised. A state that keeps all 144 is
    also asked to keep 72, by the request. Whether the answer is right is not looked at.
    """
    report = run("shipped", patience=PATIENCE)
    served, full = report["states"][name], report["full"]
    assert "error" not in served, served["error"]
    assert min(map(int, served["answers"])) < TOKENS
    for kept, answer in served["answers"].items():
        assert answer["prompt_tokens"] == full["prompt_tokens"] - TOKENS + min(int(kept), TOKENS)
        assert answer["text"]
    assert served["errors"] == {}
    assert served["fallbacks"]["reference"] == served["fallbacks"]["uniform"] == 0
    assert served["fallbacks"]["none"] > 0
