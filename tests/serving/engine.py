"""Engines in this process, for tests that look inside, and what they are asked about."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from PIL import Image
from torch import Tensor, nn

from benchmarks.yardsticks.examples import (
    CHECKPOINTS,
    Example,
    as_picture,
    draw_examples,
    format_prompt,
)
from tests.tpdsl.samples import edited, sample
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.selftest.engine import Engine as SelftestEngine
from vllm_autoprune.selftest.questions import picture
from vllm_autoprune.serving.models import pruned_model
from vllm_autoprune.serving.plan import ItemPlan
from vllm_autoprune.serving.worker import batch, selection
from vllm_autoprune.serving.worker.batch import _RegionBatch
from vllm_autoprune.tpdsl.loading import load_state

ROOT = Path(os.environ.get("MINILLAVA", CHECKPOINTS["minillava"]))
LLAVA = ROOT / "llava"
CLIP = ROOT / "clip"
TOKENS = 144
"""Visual tokens of one image of mini-LLaVA, N."""

STATE: Mapping[str, object] = {
    "state": "autoprune",
    "budget": 32,
    "text_tower": str(CLIP),
}

Answer = dict[str, Any]
"""A completion as JSON: its ``text``, ``logprob``, ``prompt_tokens``, and ``cached`` ones."""

Prompt = dict[str, Any]

# ---- what is served and asked ----


def alone(base: str, budget: int = 16) -> dict[str, object]:
    """A state of one base policy without exchange."""
    changes = {
        "/base_policy": {"name": base, "params": {}},
        "/constraints/selector/q_e": 0,
    }
    return edited(
        sample(), {**changes, "/budget/atom": f"fixed_budget@{budget}", "/name": base}
    )


def state_with_core(name: str = "cdpruner", **core: object) -> dict[str, object]:
    """A shipped state with a core; CDPruner's has one by DivPrune."""
    return {**load_state(name).model_dump(mode="json"), "core": core or {"share": 0.75}}


CORES: Mapping[str, dict[str, object]] = {
    "cdpruner with a core": state_with_core(),
    "autoprune with a core": state_with_core(
        "autoprune", share=0.5, policy={"name": "visionzip"}, cover=0.4, strength=0.2
    ),
}
"""States that requests bring, by their name in :func:`render_prompt`."""


@cache
def examples(scenes: int = 4) -> list[Example]:
    """Questions of the held-out split with short free-form answers."""
    kinds = ("digit", "colour", "shape", "text", "relation")
    return [e for e in draw_examples("test", scenes) if e.kind in kinds]


@cache
def built(backbone: str) -> Path:
    """Folder of the selftest's tiny model of a backbone, which exists as long as this process."""
    return build(backbone, Path(_FOLDER.name, backbone))


def page(width: int, height: int, seed: int) -> Image.Image:
    """A blank page, but for its upper left."""
    blank = Image.new("RGB", (width, height), "white")
    blank.paste(picture(width // 16 * 8, height // 16 * 8, seed), (8, 8))
    return blank


_FOLDER = TemporaryDirectory(prefix="tiny-models-")


def turn(text: str, *images: Tensor | Image.Image) -> dict[str, Any]:
    """A user turn: images first, then the text."""
    pictures = [i if isinstance(i, Image.Image) else as_picture(i) for i in images]
    parts: list[dict[str, object]] = [
        {"type": "image_pil", "image_pil": i} for i in pictures
    ]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def said(text: str) -> dict[str, Any]:
    """A turn of the assistant."""
    return {"role": "assistant", "content": text}


def raw_prompt(text: str, image: object, **entry: object) -> Prompt:
    """A raw prompt about an image or several, under a pruning entry."""
    return {
        "prompt": text,
        "multi_modal_data": {"image": image},
        "mm_processor_kwargs": {"autoprune": entry},
    }


def prompt(example: Example, **entry: object) -> Prompt:
    """An example as a raw prompt, under a pruning entry."""
    return raw_prompt(
        format_prompt(example.question), as_picture(example.image), **entry
    )


def choose(budget: int, policy: str | None) -> dict[str, object]:
    """A pruning entry: K with a control, a state, one of :data:`CORES`, or the engine's state."""
    if policy == "off":
        return {"enabled": False}
    if policy in ("random", "resized"):
        return {"budget": budget, "keep": policy}
    return {
        "budget": budget,
        **({"state": CORES.get(policy, policy)} if policy else {}),
    }


Request = tuple[int, int, str | None, int, int]
"""Question, K, state or control, later turns and K_r of a request."""


def render_prompt(
    number: int, budget: int, policy: str | None = None, later: int = 0, recall: int = 0
) -> Prompt:
    """The raw prompt of a :data:`Request`: a conversation about an example's image."""
    questions = examples(6)
    turns = [
        questions[(number + offset) % len(questions)].question
        for offset in range(1, later + 1)
    ]
    text = format_prompt(questions[number].question)
    text += "".join(f" red</s>USER: <image>\n{turn} ASSISTANT:" for turn in turns)
    recalled = {
        "recall": recall,
        "recall_turns": [{"images": 1, "text": turn} for turn in turns],
    }
    image = as_picture(questions[number].image)
    return raw_prompt(text, image, **choose(budget, policy), **recalled)


# ---- engines ----


def greedy(tokens: int, **more: Any) -> Any:
    """Sampling parameters of greedy decoding."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, **more)


class Engine(SelftestEngine):
    """An engine that tests ask."""

    def stop(self) -> None:
        """End it, so that this process can start another one."""
        _RUNNING.remove(self)
        super().stop()

    def counter(self, name: str) -> float:
        """Sum of one of vLLM's counters over its labels."""
        metrics = self.llm.get_metrics()
        return float(
            sum(
                getattr(metric, "value", 0) for metric in metrics if metric.name == name
            )
        )

    def chat(
        self,
        *talks: Sequence[object],
        tokens: int = 4,
        entry: Mapping[str, object] | None = None,
    ) -> list[Answer]:
        """Answers to chat conversations, all submitted at once, under one pruning entry."""
        kwargs = None if entry is None else {"autoprune": dict(entry)}
        sampling = greedy(tokens, logprobs=0)
        outputs = self.llm.chat(
            list(talks), sampling, use_tqdm=False, mm_processor_kwargs=kwargs
        )
        return [_read_answer(output) for output in outputs]

    def ask(self, example: Example) -> Answer:
        """The answer to one example."""
        return self.chat([turn(example.question, example.image)])[0]

    def generate(self, prompts: Sequence[Prompt], tokens: int = 4) -> list[Answer]:
        """Answers to raw prompts, all submitted at once."""
        outputs = self.llm.generate(
            list(prompts), greedy(tokens, logprobs=0), use_tqdm=False
        )
        return [_read_answer(output) for output in outputs]

    def generate_each(self, prompts: Sequence[Prompt], tokens: int = 4) -> list[Answer]:
        """Answers to raw prompts, one after another."""
        return [self.generate([prompt], tokens)[0] for prompt in prompts]

    def complete(
        self, prompts: Sequence[Prompt], tokens: int = 12, **more: Any
    ) -> list[list[int]]:
        """Token ids of greedy answers of exactly so many tokens, all submitted at once."""
        sampling = greedy(tokens, ignore_eos=True)
        outputs = self.llm.generate(list(prompts), sampling, use_tqdm=False, **more)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def complete_alone(
        self, prompts: Sequence[Prompt], tokens: int = 12
    ) -> list[list[int]]:
        """The same, each with empty caches."""
        answers = []
        for prompt in prompts:
            self.empty_caches()
            answers += self.complete([prompt], tokens)
        return answers


_RUNNING: list[Engine] = []


def start(
    settings: Mapping[str, object] | None = STATE, model: Path = LLAVA, **more: Any
) -> Engine:
    """Start an engine, on mini-LLaVA by default, with a state unless ``settings`` is None."""
    options = {"max_model_len": 2048, "limit_mm_per_prompt": {"image": 128}, **more}
    engine = Engine(model, settings, **options)
    _RUNNING.append(engine)
    return engine


def stop_all() -> None:
    """End all running engines of this process."""
    for engine in list(_RUNNING):
        engine.stop()


def _read_answer(output: Any) -> Answer:
    return {
        "text": output.outputs[0].text.strip(),
        "logprob": float(output.outputs[0].cumulative_logprob or 0.0),
        "prompt_tokens": len(output.prompt_token_ids or []),
        "cached": output.num_cached_tokens or 0,
    }


def assert_same(
    answers: Sequence[Answer], expected: Sequence[Answer], tolerance: float = 1e-3
) -> None:
    """Equal answers to prompts of equal length, their log-probabilities up to rounding."""
    for answer, other in zip(answers, expected, strict=True):
        assert (answer["text"], answer["prompt_tokens"]) == (
            other["text"],
            other["prompt_tokens"],
        )
        assert answer["logprob"] == pytest.approx(other["logprob"], abs=tolerance)


# ---- what is selected inside an engine ----


@dataclass
class Watch:
    """Record of selections: kept tokens and rows of each plan, budgets of each batch."""

    kept: dict[ItemPlan, list[int]] = field(default_factory=dict)
    rows: dict[ItemPlan, Tensor] = field(default_factory=dict)
    budgets: list[list[int]] = field(default_factory=list)
    before_broadcast: list[list[list[int]]] = field(default_factory=list)

    def take(self) -> dict[ItemPlan, list[int]]:
        """Kept tokens by plan, which are then forgotten."""
        taken = self.kept
        self.kept = {}
        return taken


def watch() -> Watch:
    """Start recording, until the function of the test ends (:mod:`tests.serving.runners`)."""
    record = Watch()
    prune = batch.prune_images
    select = _RegionBatch.select
    broadcast = selection._broadcast_selection

    within: list[_RegionBatch] = []

    def record_budgets(
        context: Any, plans: Sequence[ItemPlan], images: Any
    ) -> list[Tensor]:
        record.budgets.append([plan.budget for plan in plans])
        return prune(context, plans, images)

    def record_selection(regions: _RegionBatch) -> Any:
        within.append(regions)
        tokens = select(regions)
        within.pop()
        if not within:  # not one of an item that another one stands beside
            record.kept.update(zip(regions.plans, tokens.indices.tolist(), strict=True))
            record.rows.update(zip(regions.plans, tokens.features, strict=True))
        return tokens

    def record_choice(chosen: Any, budget: int) -> Any:
        record.before_broadcast.append(chosen.indices.tolist())
        return broadcast(chosen, budget)

    patch.object(pruned_model, "prune_images", record_budgets).start()
    patch.object(_RegionBatch, "select", record_selection).start()
    patch.object(selection, "_broadcast_selection", record_choice).start()
    return record


def breaking(module: nn.Module, value: float) -> Any:
    """Make a module return non-finite values; the handle's ``remove`` undoes it."""

    def spoil(module: object, inputs: object, output: Tensor) -> Tensor:
        output = output.clone()
        output[:, 5] = value
        return output

    return module.register_forward_hook(spoil)
