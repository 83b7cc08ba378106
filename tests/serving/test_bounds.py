"""Upper bounds of one encoder call."""

from __future__ import annotations

import pytest

from tests.serving.runners import Runner
from tests.serving.scenarios.bounds import COUNTED, TOKENS_OF_A_STEP

pytestmark = [
    pytest.mark.engine,
    pytest.mark.both,
    pytest.mark.timeout(500),
    pytest.mark.scenarios("bounds"),
]

MODELS = ("llava", COUNTED, "qwen2_5_vl", "llava_next")


@pytest.mark.parametrize("model", MODELS)
def test_encoder_call_does_not_exceed_the_profiled_size(runner: Runner, model: str) -> None:
    report = runner.run("bounds")[model]
    assert len(report["tokens"]) > 1
    assert max(report["tokens"]) <= report["profiled"]["tokens"]
    if model != "llava_next":  # padding is removed after its tower
        assert max(report["bytes"]) <= report["profiled"]["bytes"]


def test_step_does_not_exceed_the_encoder_budget(runner: Runner) -> None:
    """Decoding requests wait for the encoder no longer than in stock vLLM."""
    report = runner.run("bounds")
    assert max(report[COUNTED]["steps"]) <= TOKENS_OF_A_STEP < max(report["llava"]["steps"])


@pytest.mark.parametrize("model", MODELS)
def test_small_images_are_encoded_together(runner: Runner, model: str) -> None:
    """Calls are bounded by tokens, not by images."""
    report = runner.run("bounds")[model]
    assert len(report["tokens"]) < len(report["together"])


@pytest.mark.parametrize("model", MODELS)
def test_burst_and_single_requests_keep_the_same_tokens(runner: Runner, model: str) -> None:
    report = runner.run("bounds")[model]
    assert report["kept_together"] == report["kept_alone"]
    for burst, single in zip(report["together"], report["alone"], strict=True):
        assert burst["prompt_tokens"] == single["prompt_tokens"]
        assert burst["logprob"] == pytest.approx(single["logprob"], abs=3e-2)
