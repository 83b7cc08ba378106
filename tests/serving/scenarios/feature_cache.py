"""Scenario: which images the feature cache holds, for how long, and for which tenant."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tests.serving.engine import (
    STATE,
    ask,
    chat,
    examples,
    forget,
    generate,
    model_of,
    picture,
    prompt,
    release,
    start,
    vision_runs,
)
from tests.serving.scenarios import Report, scenario

if TYPE_CHECKING:
    from vllm import LLM

    from vllm_autoprune.serving.worker.features import FeatureCache

NAMES = 40
"""Names of later images that one request sends beforehand."""


@scenario
def feature_cache() -> Report:
    """Tenants with one cache salt each, resets of vLLM's caches, and planted uuids.

    ``renamed`` has answers about two images of different size, at once and one after the other,
    without a ``uuid`` and under one. ``tenants`` has runs of the vision tower a request, ``resets``
    the images that are still held after each reset, ``planted`` answers about one image before and
    after another was sent under the names that vLLM will give it.
    """
    llm = start({**STATE, "budget": 16})
    report: Report = {
        "tenants": _run_as_tenants(llm),
        "resets": _count_after_resets(llm),
        "renamed": [_ask_under(llm, uuid) for uuid in (None, "one name")],
    }
    release(llm)
    llm = start({**STATE, "budget": 16}, mm_processor_cache_gb=0, enable_prefix_caching=False)
    return {**report, "planted": _plant_names(llm)}


def _run_as_tenants(llm: LLM) -> list[tuple[str, int]]:
    first, second, third = examples(1)[:3]
    runs = []
    for salt, example in (("a", first), ("a", second), ("b", first), ("", first), ("a", third)):
        before = vision_runs(llm)
        salted = {"cache_salt": salt} if salt else {}
        generate(llm, [{**prompt(example), **salted}])
        runs.append((salt, vision_runs(llm) - before))
    return runs


def _count_after_resets(llm: LLM) -> dict[str, int]:
    model = model_of(llm)
    name, weight = next(iter(model.named_parameters()))
    resets: dict[str, Callable[[], object]] = {
        "reset_mm_cache": llm.llm_engine.reset_mm_cache,
        "reset_encoder_cache": llm.llm_engine.reset_encoder_cache,
        "reload_weights": lambda: llm.collective_rpc(
            "reload_weights",
            kwargs={
                "weights_iterator": [(name, weight.detach().clone())],
                "is_checkpoint_format": False,
            },
        ),
    }
    left = {}
    # One question each, because vLLM's encoder cache would serve a repeated image.
    for (called, reset), example in zip(resets.items(), examples(2)[-3:], strict=True):
        llm.reset_prefix_cache()
        ask(llm, example)
        entries = len(_cache(llm))
        with torch.no_grad():  # kernel-format weights are copied into parameters as they are
            reset()
        left[called] = len(_cache(llm)) if entries else -1
    return left


def _ask_under(llm: LLM, uuid: str | None) -> list[dict[str, object]]:
    questions = examples(2)
    pictures = picture(questions[0].image), picture(questions[-1].image).resize((80, 300))
    forget(llm)
    answers = []
    for images in (pictures, pictures[:1], pictures[1:]):
        named = {} if uuid is None else {"uuid": uuid}
        parts = [{"type": "image_pil", "image_pil": image, **named} for image in images]
        text = {"type": "text", "text": questions[0].question}
        answers.append(chat(llm, [[{"role": "user", "content": [*parts, text]}]])[0].plain())
    return answers


def _plant_names(llm: LLM) -> list[dict[str, object]]:
    questions = examples(2)
    victim, planted = questions[0], picture(questions[-1].image)
    answers = [ask(llm, victim).plain()]
    pictures = [
        {"type": "image_pil", "image_pil": planted, "uuid": f"renderer0-mm-{n}-image-0"}
        for n in range(NAMES)
    ]
    chat(llm, [[{"role": "user", "content": [*pictures, {"type": "text", "text": "What?"}]}]])
    answers += [ask(llm, victim).plain() for _ in range(3)]
    return answers


def _cache(llm: LLM) -> FeatureCache:
    vision = model_of(llm).autoprune
    assert vision is not None
    return vision.cache
