"""Bounds of one encoder call, whatever a step holds."""

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
def test_a_call_holds_no_more_than_profiling_saw(runner: Runner, model: str) -> None:
    report = runner.run("bounds")[model]
    assert len(report["tokens"]) > 1
    assert max(report["tokens"]) <= report["profiled"]["tokens"]
    if model != "llava_next":  # tokens that are padding are cut off after its tower
        assert max(report["bytes"]) <= report["profiled"]["bytes"]


def test_a_step_encodes_no_more_than_its_budget_where_the_scheduler_counts(runner: Runner) -> None:
    """Then nobody who is decoding waits for more of an encoder than in stock vLLM."""
    report = runner.run("bounds")
    assert max(report[COUNTED]["steps"]) <= TOKENS_OF_A_STEP < max(report["llava"]["steps"])


@pytest.mark.parametrize("model", MODELS)
def test_small_images_share_a_call(runner: Runner, model: str) -> None:
    """Bounded by tokens, not by images: fewer calls than images."""
    report = runner.run("bounds")[model]
    assert len(report["tokens"]) < len(report["together"])


@pytest.mark.parametrize("model", MODELS)
def test_a_burst_keeps_what_single_requests_keep(runner: Runner, model: str) -> None:
    report = runner.run("bounds")[model]
    assert report["kept_together"] == report["kept_alone"]
    for burst, single in zip(report["together"], report["alone"], strict=True):
        assert burst["prompt_tokens"] == single["prompt_tokens"]
        assert burst["logprob"] == pytest.approx(single["logprob"], abs=3e-2)
