"""Engine in this process, for tests that inspect its internals, and the checkpoints it serves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from PIL import Image
from torch import Tensor, nn

from benchmarks.yardsticks.examples import CHECKPOINTS, Example, draw_examples, format_prompt
from tests.tpdsl.samples import edited, sample
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.selftest.serve import empty_caches, start_engine, stop_engine
from vllm_autoprune.serving.plan import ItemPlan
from vllm_autoprune.serving.worker import batch, regions, selection
from vllm_autoprune.serving.worker.features import ImageFeatures
from vllm_autoprune.serving.worker.regions import RegionShare, SelectionContext
from vllm_autoprune.tpdsl.base_policy import RefinedTokens, TokenSelection
from vllm_autoprune.tpdsl.loading import load_state

if TYPE_CHECKING:
    from vllm import LLM


ROOT = Path(os.environ.get("MINILLAVA", CHECKPOINTS["minillava"]))
LLAVA, CLIP = ROOT / "llava", ROOT / "clip"
TOKENS = 144
"""Visual tokens of one image, N."""

STATE: Mapping[str, object] = {"state": "autoprune", "budget": 32, "text_tower": str(CLIP)}

Answer = dict[str, Any]
"""A completion as JSON: its ``text``, ``logprob``, ``prompt_tokens``, and ``cached`` ones."""

Prompt = Mapping[str, object]


# ---- what is served and asked ----


def alone(base: str, budget: int = 16, **params: object) -> dict[str, object]:
    """A state of one base policy without exchange."""
    state = {"/base_policy": {"name": base, "params": params}, "/constraints/selector/q_e": 0}
    return edited(sample(), {**state, "/budget/atom": f"fixed_budget@{budget}", "/name": base})


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
    """The folder of the selftest's tiny model of a backbone, which exists as long as this process.

    vLLM reads its processor whenever it needs it.
    """
    return build(backbone, Path(_FOLDER.name, backbone))


_FOLDER = TemporaryDirectory(prefix="tiny-models-")


def picture(image: Tensor) -> Image.Image:
    """The image of an example, as chat clients send it."""
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def turn(text: str, *images: Tensor | Image.Image) -> dict[str, Any]:
    """A user turn: images first, then the text."""
    pictures = [i if isinstance(i, Image.Image) else picture(i) for i in images]
    parts: list[dict[str, object]] = [{"type": "image_pil", "image_pil": i} for i in pictures]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def said(text: str) -> dict[str, Any]:
    """A turn of the assistant."""
    return {"role": "assistant", "content": text}


def raw_prompt(text: str, image: object, **entry: object) -> dict[str, Any]:
    """A raw prompt about an image or several, under a pruning entry."""
    return {
        "prompt": text,
        "multi_modal_data": {"image": image},
        "mm_processor_kwargs": {"autoprune": entry},
    }


def prompt(example: Example, **entry: object) -> dict[str, Any]:
    """An example as a raw prompt, under a pruning entry."""
    return raw_prompt(format_prompt(example.question), picture(example.image), **entry)


def choose(budget: int, policy: str | None) -> dict[str, object]:
    """A pruning entry: K with a control, a state, one of :data:`CORES`, or the engine's state."""
    if policy == "off":
        return {"enabled": False}
    if policy in ("random", "resized"):
        return {"budget": budget, "keep": policy}
    return {"budget": budget, **({"state": CORES.get(policy, policy)} if policy else {})}


def render_prompt(
    number: int, budget: int, policy: str | None = None, later: int = 0, recall: int = 0
) -> dict[str, Any]:
    """A conversation about an example's image: K, a state or control, later turns and their K_r."""
    questions = examples(6)
    turns = [questions[(number + at + 1) % len(questions)].question for at in range(later)]
    text = format_prompt(questions[number].question)
    text += "".join(f" red</s>USER: <image>\n{turn} ASSISTANT:" for turn in turns)
    recalled = {"recall": recall, "recall_turns": [{"images": 1, "text": turn} for turn in turns]}
    image = picture(questions[number].image)
    return raw_prompt(text, image, **choose(budget, policy), **recalled)


# ---- engines ----


_RUNNING: list[LLM] = []


def start(settings: Mapping[str, object] | None = STATE, model: Path = LLAVA, **more: Any) -> LLM:
    """Start an engine, on mini-LLaVA by default, with a state unless ``settings`` is None."""
    options = {"max_model_len": 2048, "limit_mm_per_prompt": {"image": 128}, **more}
    llm: LLM = start_engine(model, settings, **options)
    _RUNNING.append(llm)
    return llm


def release(llm: LLM) -> None:
    """End an engine of this process, so that another one can start."""
    _RUNNING.remove(llm)
    stop_engine(llm)


def release_all() -> None:
    """End all running engines of this process."""
    for llm in list(_RUNNING):
        release(llm)


def runner_of(llm: LLM) -> Any:
    """The model runner; needs the engine in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def model_of(llm: LLM) -> Any:
    """The model object; needs the engine in this process."""
    return runner_of(llm).model


def vision_runs(llm: LLM) -> int:
    """Number of runs of the vision tower on requests."""
    runs: int = model_of(llm).autoprune.runs
    return runs


def counter(llm: LLM, name: str) -> float:
    """Sum of one of vLLM's counters over its labels."""
    return float(sum(getattr(m, "value", 0) for m in llm.get_metrics() if m.name == name))


# ---- answers ----


def greedy(tokens: int, **more: Any) -> Any:
    """Sampling parameters of greedy decoding."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, **more)


def chat(
    llm: LLM,
    conversations: Sequence[Sequence[object]],
    tokens: int = 4,
    entry: Mapping[str, object] | None = None,
) -> list[Answer]:
    """Answers to chat conversations, all submitted at once, under one pruning entry."""
    kwargs = None if entry is None else {"autoprune": dict(entry)}
    sampling = greedy(tokens, logprobs=0)
    outputs = llm.chat(list(conversations), sampling, use_tqdm=False, mm_processor_kwargs=kwargs)
    return [_answer(output) for output in outputs]


def ask(llm: LLM, example: Example) -> Answer:
    """The answer to one example."""
    return chat(llm, [[turn(example.question, example.image)]])[0]


def generate(llm: LLM, prompts: Sequence[Prompt], tokens: int = 4) -> list[Answer]:
    """Answers to raw prompts, all submitted at once."""
    outputs = llm.generate(list(prompts), greedy(tokens, logprobs=0), use_tqdm=False)
    return [_answer(output) for output in outputs]


def generate_each(llm: LLM, prompts: Sequence[Prompt], tokens: int = 4) -> list[Answer]:
    """Answers to raw prompts, one after another."""
    return [generate(llm, [each], tokens)[0] for each in prompts]


def complete(llm: LLM, prompts: Sequence[Prompt], tokens: int = 12, **more: Any) -> list[list[int]]:
    """Token ids of greedy answers of exactly so many tokens, all submitted at once."""
    outputs = llm.generate(list(prompts), greedy(tokens, ignore_eos=True), use_tqdm=False, **more)
    return [list(output.outputs[0].token_ids) for output in outputs]


def complete_alone(llm: LLM, prompts: Sequence[Prompt], tokens: int = 12) -> list[list[int]]:
    """The same, each with empty caches."""
    answers = []
    for each in prompts:
        empty_caches(llm)
        answers += complete(llm, [each], tokens)
    return answers


def _answer(output: Any) -> Answer:
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
    for answer, known in zip(answers, expected, strict=True):
        assert (answer["text"], answer["prompt_tokens"]) == (known["text"], known["prompt_tokens"])
        assert answer["logprob"] == pytest.approx(known["logprob"], abs=tolerance)


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
        taken, self.kept = self.kept, {}
        return taken


def watch() -> Watch:
    """Start recording."""
    from vllm_autoprune.serving.models import pruned_model

    seen = Watch()
    prune, select, agree = batch.prune_images, regions.select_region, selection._broadcast_selection

    def images(
        context: SelectionContext, plans: Sequence[ItemPlan], images: Sequence[ImageFeatures]
    ) -> list[Tensor]:
        seen.budgets.append([plan.budget for plan in plans])
        return prune(context, plans, images)

    def selected(
        context: SelectionContext,
        plans: Sequence[ItemPlan],
        images: Sequence[ImageFeatures],
        at: int,
        share: RegionShare,
    ) -> RefinedTokens:
        tokens = select(context, plans, images, at, share)
        for plan, kept, rows in zip(plans, tokens.indices.tolist(), tokens.features, strict=True):
            seen.kept[plan] = kept
            seen.rows[plan] = rows
        return tokens

    def agreed(chosen: TokenSelection) -> TokenSelection:
        seen.before_broadcast.append(chosen.indices.tolist())
        return agree(chosen)

    patch.object(pruned_model, "prune_images", images).start()
    patch.object(batch, "select_region", selected).start()
    patch.object(selection, "_broadcast_selection", agreed).start()
    return seen


def breaking(module: nn.Module, value: float) -> Any:
    """Make a module return non-finite values; the handle's ``remove`` undoes it."""

    def spoil(module: object, inputs: object, output: Tensor) -> Tensor:
        output = output.clone()
        output[:, 5] = value
        return output

    return module.register_forward_hook(spoil)
