"""Scenario: which images the feature cache holds, for how long, and for which tenant."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.serving.engine import (
    LLAVA,
    STATE,
    Watch,
    ask,
    chat,
    examples,
    forget,
    generate,
    model_of,
    prompt,
    release,
    start,
    turn,
    vision_runs,
    watch,
)
from tests.serving.scenarios import Report, Runner, scenario
from tests.serving.test_modes import start_mode

if TYPE_CHECKING:
    from vllm import LLM

    from vllm_autoprune.serving.worker.features import FeatureCache

pytestmark = pytest.mark.engine


@scenario
def feature_cache() -> Report:
    """``tenants``: runs of the vision tower a request, with one cache salt each.

    ``resets``: images that are still held after each reset of vLLM's caches.
    """
    llm = start({**STATE, "budget": 16})
    return {"tenants": _run_as_tenants(llm), "resets": _count_after_resets(llm)}


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


def _cache(llm: LLM) -> FeatureCache:
    vision = model_of(llm).autoprune
    assert vision is not None
    return vision.cache


STATES = (None, "visionzip", "fastv")
"""They read the text tower, [CLS] attention, and the language model's first layers."""


@scenario
def reloaded_weights() -> Report:
    """``answers`` and kept tokens of an engine before, with other weights, and with its first ones.

    ``expected``: those of engines that were started with these weights.
    """
    with tempfile.TemporaryDirectory() as folder:
        other = _write_other_weights(Path(folder) / "other")
        seen, expected = watch(), []
        for model in (LLAVA, other):
            llm = start_mode(model=str(model))
            expected.append(_answer(llm, seen))
            release(llm)
        llm = start_mode()
        answers = [_answer(llm, seen)]
        for model in (other, LLAVA):
            # An operator empties vLLM's caches: the prefix cache goes by token ids, and the
            # scheduler counts on encoder outputs that the worker drops.
            forget(llm)
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
            answers.append(_answer(llm, seen))
        return {"answers": answers, "expected": expected}


def _answer(llm: LLM, seen: Watch) -> list[dict[str, Any]]:
    example = examples(1)[0]
    answers = []
    for state in STATES:
        seen.kept.clear()
        entry = {"budget": 16, **({} if state is None else {"state": state})}
        (answer,) = chat(llm, [[turn(example.question, example.image)]], tokens=8, entry=entry)
        answers.append({**answer.plain(), "kept": list(seen.kept.values())})
    return answers


def _write_other_weights(folder: Path) -> Path:
    """mini-LLaVA with its projector's rows in another order, and another first language layer."""
    shutil.copytree(LLAVA, folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.startswith("multi_modal_projector.linear_2") or ".layers.0.self_attn.q" in name:
            weights[name] = weight.flip(0).contiguous()
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_features_are_not_shared_between_cache_salts(runner: Runner) -> None:
    """Sharing would leak through the time to first token (CVE-2025-46570)."""
    runs = runner.run("feature_cache")["tenants"]
    assert runs == [["a", 1], ["a", 0], ["b", 1], ["", 1], ["a", 0]]


def test_cache_resets_and_new_weights_clear_features(runner: Runner) -> None:
    left = runner.run("feature_cache")["resets"]
    assert left == {"reset_mm_cache": 0, "reset_encoder_cache": 0, "reload_weights": 0}


@pytest.mark.exhaustive
def test_new_weights_from_disk_answer_as_a_new_engine(runner: Runner) -> None:
    report = runner.run("reloaded_weights")
    first, other = report["expected"]
    assert report["answers"] == [first, other, first]
    assert all(a["kept"] and a["kept"] != b["kept"] for a, b in zip(first, other, strict=True))
