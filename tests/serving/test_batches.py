"""Invariants 1 and 4 under load: encoder calls stay bounded, and bursts keep what single ones do.

That mixed budgets, states and controls in one batch keep what they keep alone:
``test_requests.test_mixed_concurrent_requests_equal_single_ones``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from tests.serving.engine import (
    STATE,
    Answer,
    built,
    chat,
    forget,
    model_of,
    release,
    runner_of,
    start,
    turn,
    watch,
)
from tests.serving.scenarios import Report, Runner, scenario
from vllm_autoprune.selftest.tiny_engine import picture

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = [pytest.mark.engine, pytest.mark.both, pytest.mark.timeout(500)]


SIZES = ((448, 448), (56, 56), (280, 112), (112, 336), (84, 84), (224, 224))
REQUESTS = range(36)
TOKENS_OF_A_STEP = 1024
COUNTED = "llava, the scheduler counting unpruned tokens"
MODELS = ("llava", COUNTED, "qwen2_5_vl", "llava_next")
MANAGER = {
    "encoder_cache_manager_cls": "vllm_autoprune.serving.encoder_budget.UnprunedBudgetManager"
}
"""As an operator gives it to ``--ec-manager-config``."""


@scenario
def bounds() -> Report:
    """By model: unpruned ``tokens`` and pixel ``bytes`` of each encoder call, tokens of a step.

    ``profiled``: the largest call of vLLM's profiling run. ``together``, ``alone``: answers of a
    burst and of the same requests one by one, with what each kept.
    """
    report = {
        "llava": _measure({**STATE, "budget": 4}),
        COUNTED: _measure({**STATE, "budget": 4}, ec_manager_config=MANAGER),
    }
    for name in MODELS[2:]:
        # Otherwise Qwen is profiled with a video.
        limits = {"image": 8, "video": 0} if name == "qwen2_5_vl" else {"image": 8}
        report[name] = _measure(
            {"state": "autoprune", "budget": 4},
            model=str(built(name)),
            max_model_len=1024,
            limit_mm_per_prompt=limits,
        )
    return report


def _measure(settings: Mapping[str, object], **options: object) -> Report:
    llm = start(settings, max_num_batched_tokens=TOKENS_OF_A_STEP, max_num_seqs=64, **options)
    model, runner = model_of(llm), runner_of(llm)
    calls: dict[str, list[int]] = {"tokens": [], "bytes": [], "steps": [0]}
    encode, execute = model.embed_multimodal, runner.execute_model

    def step(*args: object, **named: object) -> object:
        calls["steps"].append(0)
        return execute(*args, **named)

    def embed(**inputs: object) -> object:
        tensors = {
            name: value
            for name, value in inputs.items()
            if isinstance(value, Tensor | list) and name != "autoprune_plan"
        }
        tokens = sum(image.tokens for image in model.autoprune.images(tensors))
        parts = [part for value in tensors.values() for part in value]
        calls["tokens"].append(tokens)
        calls["bytes"].append(sum(part.numel() * part.element_size() for part in parts))
        calls["steps"][-1] += tokens
        return encode(**inputs)

    model.embed_multimodal, runner.execute_model = embed, step
    # vLLM profiles only GPUs at start; on a CPU the compiler's warm-up does it.
    with torch.inference_mode():
        runner.profile_run()
    profiled = {name: max(sizes) for name, sizes in calls.items()}
    calls |= {"tokens": [], "bytes": [], "steps": [0]}
    seen = watch()
    report: dict[str, Any] = {"profiled": profiled, "together": _ask(llm, REQUESTS)}
    report |= {"kept_together": seen.take(), **{name: list(calls[name]) for name in calls}}
    forget(llm)
    report["alone"] = [answer for i in REQUESTS for answer in _ask(llm, [i])]
    report["kept_alone"] = seen.take()
    release(llm)
    return report


def _ask(llm: LLM, requests: Iterable[int]) -> list[Answer]:
    pictures = [picture(*SIZES[i % len(SIZES)], i) for i in requests]
    return chat(llm, [[turn("what colour is the cat", each)] for each in pictures])


@pytest.mark.parametrize("model", MODELS)
def test_encoder_calls_are_bounded_by_the_profiled_size_not_by_images(
    runner: Runner, model: str
) -> None:
    report = runner.run("bounds")[model]
    assert 1 < len(report["tokens"]) < len(report["together"])
    assert max(report["tokens"]) <= report["profiled"]["tokens"]
    if model != "llava_next":  # padding is removed after its tower
        assert max(report["bytes"]) <= report["profiled"]["bytes"]


def test_step_does_not_exceed_the_encoder_budget(runner: Runner) -> None:
    """Decoding requests wait for the encoder no longer than in stock vLLM."""
    report = runner.run("bounds")
    assert max(report[COUNTED]["steps"]) <= TOKENS_OF_A_STEP < max(report["llava"]["steps"])


@pytest.mark.parametrize("model", MODELS)
def test_burst_and_single_requests_keep_the_same_tokens(runner: Runner, model: str) -> None:
    report = runner.run("bounds")[model]
    assert report["kept_together"] == report["kept_alone"]
    for burst, single in zip(report["together"], report["alone"], strict=True):
        assert burst["prompt_tokens"] == single["prompt_tokens"]
        assert burst["logprob"] == pytest.approx(single["logprob"], abs=3e-2)
