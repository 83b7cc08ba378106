"""Invariants 1 and 4 under load: budgets mix in a batch, and encoder calls stay bounded."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from tests.serving.engine import (
    STATE,
    TOKENS,
    Answer,
    chat,
    examples,
    forget,
    generate,
    model_of,
    picture,
    prompt,
    release,
    start,
    turn,
    watch,
)
from tests.serving.scenarios import Report, Runner, scenario
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.selftest.tiny_engine import picture as draw_picture

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = [pytest.mark.engine, pytest.mark.both, pytest.mark.timeout(500)]


@scenario
def batches() -> Report:
    """Mixed budgets at once and one by one, bounded vision batches, many images, follow-ups."""
    llm = start({**STATE, "budget": 32})
    model = model_of(llm)
    seen = watch(model.vision_tower)
    questions = examples(4)[:12]
    budgets = [8 + 4 * i for i in range(len(questions))]
    together = generate(llm, [prompt(e, k) for e, k in zip(questions, budgets, strict=True)])
    kept_together = {str(plan): rows for plan, rows in seen.kept.items()}
    mixed = list(seen.budgets)
    forget(llm)
    seen.kept.clear()
    alone = [generate(llm, [prompt(e, k)])[0] for e, k in zip(questions, budgets, strict=True)]
    kept_alone = {str(plan): rows for plan, rows in seen.kept.items()}
    forget(llm)
    seen.vision_batches.clear()
    scenes = [picture(e.image).rotate(7 * i) for i, e in enumerate(examples(4)[:20])]
    many = [
        {
            "prompt": "USER: " + "<image>" * 20 + f"\nHow many? {i} ASSISTANT:",
            "multi_modal_data": {"image": [scene.rotate(i) for scene in scenes]},
            "mm_processor_kwargs": {"autoprune": {"budget": 2}},
        }
        for i in range(5)
    ]
    twenty = generate(llm, many)
    return {
        "together": [a.plain() for a in together],
        "alone": [a.plain() for a in alone],
        "kept_together": kept_together,
        "kept_alone": kept_alone,
        "budgets_at_once": max(len(set(b)) for b in mixed),
        "twenty": [a.plain() for a in twenty],
        "vision_batches": seen.vision_batches,
        "bound": model.autoprune_bound // TOKENS,
    }


def test_mixed_budgets_in_one_batch_answer_as_they_do_alone(runner: Runner) -> None:
    report = runner.run("batches")
    assert report["budgets_at_once"] > 4
    assert report["kept_together"] == report["kept_alone"]
    for together, alone in zip(report["together"], report["alone"], strict=True):
        assert together["text"] == alone["text"]
        assert together["logprob"] == pytest.approx(alone["logprob"], abs=2e-2)


def test_every_image_keeps_exactly_its_budget(runner: Runner) -> None:
    report = runner.run("batches")
    for plan, kept in report["kept_together"].items():
        assert f"budget={len(kept)}," in plan
        assert kept == sorted(set(kept))
        assert kept[0] >= 0 and kept[-1] < TOKENS


def test_vision_batches_stay_bounded_however_small_k_is(runner: Runner) -> None:
    """100 images of K = 2 fit one step's token budget, but not one vision batch."""
    report = runner.run("batches")
    # Features of a few of the 100 images are already cached.
    assert sum(report["vision_batches"]) > 90
    assert max(report["vision_batches"]) <= report["bound"] == 4096 // TOKENS
    assert all(answer["prompt_tokens"] < 20 * TOKENS for answer in report["twenty"])


SIZES = ((448, 448), (56, 56), (280, 112), (112, 336), (84, 84), (224, 224))
REQUESTS = 36
TOKENS_OF_A_STEP = 1024
COUNTED = "llava, the scheduler counting unpruned tokens"
MANAGER = {
    "encoder_cache_manager_cls": "vllm_autoprune.serving.encoder_budget.UnprunedBudgetManager"
}
"""As an operator gives it to ``--ec-manager-config``."""


@dataclass
class EncoderCalls:
    """Records unpruned tokens and pixel bytes of every call of ``embed_multimodal``."""

    tokens: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=lambda: [0])

    def watch(self, runner: Any) -> None:
        """Record the calls of a runner's model."""
        model = runner.model
        stock, execute = model.embed_multimodal, runner.execute_model

        def step(*args: object, **named: object) -> object:
            self.steps.append(0)
            return execute(*args, **named)

        def embed(**inputs: object) -> object:
            tensors = {
                name: value
                for name, value in inputs.items()
                if isinstance(value, Tensor | list) and name != "autoprune_plan"
            }
            self.tokens.append(sum(image.tokens for image in model.autoprune.images(tensors)))
            self.steps[-1] += self.tokens[-1]
            self.bytes.append(sum(_nbytes(value) for value in tensors.values()))
            return stock(**inputs)

        model.embed_multimodal, runner.execute_model = embed, step

    def forget(self) -> None:
        """Clear the records."""
        self.tokens.clear()
        self.bytes.clear()
        self.steps[:] = [0]


def _nbytes(value: Tensor | list[Tensor]) -> int:
    parts = value if isinstance(value, list) else [value]
    return sum(part.numel() * part.element_size() for part in parts)


@scenario
def bounds() -> Report:
    """By model: calls during profiling and a burst; answers of the burst and one by one."""
    report = {
        "llava": _measured({**STATE, "budget": 4}),
        COUNTED: _measured({**STATE, "budget": 4}, ec_manager_config=MANAGER),
    }
    for name in ("qwen2_5_vl", "llava_next"):
        with tempfile.TemporaryDirectory() as folder:
            model = str(build(name, Path(folder)))
            settings = {"state": "autoprune", "budget": 4}
            # Otherwise Qwen is profiled with a video.
            limits = {"image": 8, "video": 0} if name == "qwen2_5_vl" else {"image": 8}
            report[name] = _measured(
                settings, model=model, max_model_len=1024, limit_mm_per_prompt=limits
            )
    return report


def _measured(settings: Mapping[str, object], **options: object) -> Report:
    llm = start(settings, max_num_batched_tokens=TOKENS_OF_A_STEP, max_num_seqs=64, **options)
    model, calls = model_of(llm), EncoderCalls()
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    calls.watch(runner)
    # vLLM profiles only GPUs at start; on a CPU the compiler's warm-up does it.
    with torch.inference_mode():
        runner.profile_run()
    profiled = {"tokens": max(calls.tokens), "bytes": max(calls.bytes)}
    calls.forget()
    seen = watch()
    together = _asked(llm, range(REQUESTS))
    report = {
        "profiled": profiled,
        "tokens": list(calls.tokens),
        "bytes": list(calls.bytes),
        "steps": list(calls.steps),
        "together": [answer.plain() for answer in together],
        "kept_together": {str(plan): rows for plan, rows in seen.kept.items()},
    }
    forget(llm)
    assert model.autoprune is not None
    model.autoprune.cache.clear()
    seen.kept.clear()
    alone = [answer for i in range(REQUESTS) for answer in _asked(llm, [i])]
    report["alone"] = [answer.plain() for answer in alone]
    report["kept_alone"] = {str(plan): rows for plan, rows in seen.kept.items()}
    release(llm)
    return report


def _asked(llm: LLM, requests: Any) -> list[Answer]:
    return chat(
        llm,
        [
            [turn("what colour is the cat", draw_picture(*SIZES[i % len(SIZES)], i))]
            for i in requests
        ],
    )


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
