"""Sizes of the encoder calls during a burst of requests with images of mixed sizes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.serving.engine import STATE, Answer, chat, forget, model_of, release, start, turn
from tests.serving.scenarios import Report, scenario
from tests.serving.selection_recorder import watch
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.selftest.tiny_engine import picture

if TYPE_CHECKING:
    from vllm import LLM

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
        [[turn("what colour is the cat", picture(*SIZES[i % len(SIZES)], i))] for i in requests],
    )
