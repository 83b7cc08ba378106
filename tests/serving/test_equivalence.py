"""Invariants 1 to 4: no state changes nothing, caches share what they may, bursts are bounded.

That K >= N equals stock vLLM, and what chunked prefill, other questions and later turns change, is
what the selftest checks of every backbone, mini-LLaVA among them (``test_backbones.py``). That
features are not shared between tenants: the attack ``cache_salt`` of ``tests/hostile``.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.yardsticks.examples import Example, png_url
from tests.serving.engine import (
    LLAVA,
    STATE,
    Answer,
    Watch,
    alone,
    ask,
    assert_same,
    built,
    chat,
    examples,
    model_of,
    release,
    runner_of,
    said,
    start,
    turn,
    vision_runs,
    watch,
)
from tests.serving.runners import Result, Runner, in_engine
from vllm_autoprune.selftest.run import BLOCK
from vllm_autoprune.selftest.serve import empty_caches, picture
from vllm_autoprune.serving.api import planner
from vllm_autoprune.serving.plan import make_cache_identity

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]


def answer_without_a_state() -> Result:
    """Tokens and exact log-probabilities of a model without a state."""
    llm = start(None)
    conversations = [[turn(e.question, e.image)] for e in examples(2)]
    both = [turn("Which shape is red?", examples(2)[0].image, examples(2)[-1].image)]
    return [chat(llm, [each], tokens=8)[0] for each in (*conversations, both)]


@pytest.mark.reads.with_args(answer_without_a_state)
def test_without_a_state_the_plugin_changes_no_bit(runner: Runner) -> None:
    absent = {"VLLM_AUTOPRUNE_DISABLE": "1"}
    inert = runner.run(answer_without_a_state)
    assert inert == runner.run(answer_without_a_state, environment=absent)


@in_engine
def test_caches_do_not_change_what_is_kept() -> Result:
    """Of prefix cache, multi-modal caches and feature cache; every prompt in one step."""
    no_caches: dict[str, Any] = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
    seen, answers, kept = watch(), [], []
    questions = examples(3)[:8]
    pair = turn("What digit is on the red shape?", questions[0].image, questions[-1].image)
    for settings, options in (
        (STATE, dict[str, Any]()),
        ({**STATE, "feature_cache_gb": 0}, no_caches),
    ):
        llm = start(settings, max_num_batched_tokens=4096, **options)
        answers.append([*(ask(llm, example) for example in questions), *chat(llm, [[pair]])])
        kept.append({str([plan.instruction, rows]) for plan, rows in seen.take().items()})
        release(llm)
    assert kept[0] == kept[1]
    assert_same(answers[0], answers[1], tolerance=2e-2)
    return answers, sorted(kept[0])


def make_identity_without_question(
    image: str, served: str, budget: int, keep: Any, ids: Any, core: int
) -> str:
    """A cache identity as it must not be."""
    return make_cache_identity(image, served, budget, keep, None, core)


@in_engine
def test_negative_control_without_the_instruction_in_the_identity() -> Result:
    """Shows that answers tell a missing instruction: a trained model then gives wrong ones."""
    llm = start({**STATE, "budget": 4})
    right = [ask(llm, example) for example in examples(6)]
    llm.reset_prefix_cache()
    with patch.object(planner, "make_cache_identity", make_identity_without_question):
        wrong = [ask(llm, example) for example in examples(6)]
    answers = zip(right, wrong, examples(6), strict=True)
    assert any(right["text"] == e.answer != wrong["text"] for right, wrong, e in answers)
    return right, wrong


@in_engine
def test_a_state_that_does_not_read_the_instruction_shares_across_questions() -> Result:
    llm = start({"state": alone("divprune"), "budget": 32})
    runs = vision_runs(llm)
    new, *later = [ask(llm, example)["cached"] for example in examples(1)]
    assert new == 0 and min(later) >= BLOCK
    assert vision_runs(llm) - runs == 1
    return later


@in_engine
def test_detail_sets_the_tokens_of_an_image_and_a_later_turn_changes_nothing() -> None:
    """By ``image_url.detail``; a later turn is a text, or an image of another detail."""
    budget, low, high = 96, 64, 128
    detail = {"low": low, "high": high}
    llm = start({**STATE, "budget": budget, "detail": detail, "requests": "none"})
    example, other = examples(2)[0], examples(2)[-1]

    def show(example: Example, detail: str | None) -> dict[str, object]:
        image = {"url": png_url(example.image), **({"detail": detail} if detail else {})}
        text = {"type": "text", "text": example.question}
        return {"role": "user", "content": [{"type": "image_url", "image_url": image}, text]}

    counts = {
        detail: chat(llm, [[show(example, detail)]])[0]["prompt_tokens"]
        for detail in ("low", "high", "auto", None)
    }
    assert counts[None] == counts["auto"] == counts["low"] + budget - low
    assert counts["high"] - counts["auto"] == high - budget
    for later in ({"role": "user", "content": "And what is left of it?"}, show(other, "high")):
        empty_caches(llm)
        (answer,) = chat(llm, [[show(example, "low")]])
        (more,) = chat(llm, [[show(example, "low"), said(answer["text"]), later]])
        assert answer["cached"] == 0
        assert more["cached"] >= answer["prompt_tokens"] // BLOCK * BLOCK >= low
    assert chat(llm, [[show(example, "high")]])[0]["cached"] == 0


# ---- how long features are held ----


@in_engine
def test_cache_resets_and_new_weights_clear_features() -> None:
    llm = start({**STATE, "budget": 16})
    name, weight = next(iter(model_of(llm).named_parameters()))
    weights = {
        "weights_iterator": [(name, weight.detach().clone())],
        "is_checkpoint_format": False,
    }
    resets: tuple[Callable[[], object], ...] = (
        llm.llm_engine.reset_mm_cache,
        llm.llm_engine.reset_encoder_cache,
        lambda: llm.collective_rpc("reload_weights", kwargs=weights),
    )
    cache = model_of(llm).autoprune.cache
    # One question each, because vLLM's encoder cache would serve a repeated image.
    for reset, example in zip(resets, examples(2)[-3:], strict=True):
        llm.reset_prefix_cache()
        ask(llm, example)
        assert len(cache) > 0
        with torch.no_grad():  # kernel-format weights are copied into parameters as they are
            reset()
        assert len(cache) == 0, reset


def _answer_by_each_state(llm: LLM, seen: Watch) -> list[tuple[Answer, list[list[int]]]]:
    """Of states that read the text tower, [CLS] attention, and the language model's layers."""
    (example, *_), answers = examples(1), []
    for entry in ({}, {"state": "visionzip"}, {"state": "fastv"}):
        talk = [turn(example.question, example.image)]
        (answer,) = chat(llm, [talk], tokens=8, entry={"budget": 16, **entry})
        answers.append((answer, [*seen.take().values()]))
    return answers


@pytest.mark.exhaustive
@in_engine
def test_new_weights_from_disk_answer_as_a_new_engine() -> None:
    """Projector rows in another order, and another first language layer; then the first again."""
    settings = {**STATE, "requests": "states"}
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        shutil.copytree(LLAVA, other)
        weights = load_file(other / "model.safetensors")
        for name, weight in weights.items():
            if name.startswith("multi_modal_projector.linear_2") or ".layers.0.self_attn.q" in name:
                weights[name] = weight.flip(0).contiguous()
        (other / "model.safetensors").unlink()
        save_file(weights, other / "model.safetensors", {"format": "pt"})
        seen, expected = watch(), []
        for model in (LLAVA, other):
            llm = start(settings, model=model, dtype="float32")
            expected.append(_answer_by_each_state(llm, seen))
            release(llm)
        llm = start(settings, dtype="float32")
        answers = [_answer_by_each_state(llm, seen)]
        for model in (other, LLAVA):
            # An operator empties vLLM's caches: the prefix cache goes by token ids, and the
            # scheduler counts on encoder outputs that the worker drops.
            empty_caches(llm)
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
            answers.append(_answer_by_each_state(llm, seen))
    assert answers == [expected[0], expected[1], expected[0]]
    assert all(kept and kept != new for (_, kept), (_, new) in zip(*expected, strict=True))


# ---- bursts ----

SIZES = ((448, 448), (56, 56), (280, 112), (112, 336), (84, 84), (224, 224))
TOKENS_OF_A_STEP = 1024
COUNTED = "llava, the scheduler counting unpruned tokens"
MANAGER = {
    "encoder_cache_manager_cls": "vllm_autoprune.serving.encoder_budget.UnprunedBudgetManager"
}
"""As an operator gives it to ``--ec-manager-config``."""


def _start_for_bursts(model: str) -> LLM:
    options: dict[str, Any] = {"ec_manager_config": MANAGER} if model == COUNTED else {}
    settings: Mapping[str, object] = {**STATE, "budget": 4}
    if "llava," not in model and model != "llava":
        # Otherwise Qwen is profiled with a video.
        limits = {"image": 8, "video": 0} if model == "qwen2_5_vl" else {"image": 8}
        options = {"model": str(built(model)), "max_model_len": 1024, "limit_mm_per_prompt": limits}
        settings = {"state": "autoprune", "budget": 4}
    return start(settings, max_num_batched_tokens=TOKENS_OF_A_STEP, max_num_seqs=64, **options)


@pytest.mark.both
@pytest.mark.parametrize("model", ["llava", COUNTED, "qwen2_5_vl", "llava_next"])
@in_engine
def test_bursts_are_encoded_within_bounds_and_keep_what_single_requests_keep(model: str) -> None:
    """No encoder call exceeds the largest one of vLLM's profiling run, in tokens or in bytes.

    Nor does a step, where an operator lets the scheduler count unpruned tokens: decoding requests
    then wait for the encoder no longer than in stock vLLM.
    """
    llm = _start_for_bursts(model)
    served, runner = model_of(llm), runner_of(llm)
    calls: dict[str, list[int]] = {"tokens": [], "bytes": [], "steps": [0]}
    encode, execute = served.embed_multimodal, runner.execute_model

    def step(*args: object, **named: object) -> object:
        calls["steps"].append(0)
        return execute(*args, **named)

    def embed(**inputs: object) -> object:
        tensors = {
            name: value
            for name, value in inputs.items()
            if isinstance(value, Tensor | list) and name != "autoprune_plan"
        }
        tokens = sum(image.tokens for image in served.autoprune.images(tensors))
        parts = [part for value in tensors.values() for part in value]
        calls["tokens"].append(tokens)
        calls["bytes"].append(sum(part.numel() * part.element_size() for part in parts))
        calls["steps"][-1] += tokens
        return encode(**inputs)

    served.embed_multimodal, runner.execute_model = embed, step
    # vLLM profiles only GPUs at start; on a CPU the compiler's warm-up does it.
    with torch.inference_mode():
        runner.profile_run()
    profiled = {name: max(sizes) for name, sizes in calls.items()}
    calls.update(tokens=[], bytes=[], steps=[0])
    seen = watch()

    def ask_about(requests: Iterable[int]) -> list[Answer]:
        pictures = [picture(*SIZES[i % len(SIZES)], i) for i in requests]
        return chat(llm, [[turn("what colour is the cat", each)] for each in pictures])

    together, kept = ask_about(range(36)), seen.take()
    assert 1 < len(calls["tokens"]) < len(together)
    assert max(calls["tokens"]) <= profiled["tokens"]
    if model != "llava_next":  # padding is removed after its tower
        assert max(calls["bytes"]) <= profiled["bytes"]
    if "llava" in model and model != "llava_next":
        assert (max(calls["steps"]) <= TOKENS_OF_A_STEP) == (model == COUNTED)
    empty_caches(llm)
    single = [answer for i in range(36) for answer in ask_about([i])]
    assert seen.take() == kept
    for answer, known in zip(together, single, strict=True):
        assert answer["prompt_tokens"] == known["prompt_tokens"]
        assert answer["logprob"] == pytest.approx(known["logprob"], abs=3e-2)
