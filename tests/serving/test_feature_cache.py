"""How long the feature cache holds images.

That it is not shared between tenants: the attack ``cache_salt`` of ``tests/hostile``.
"""

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
    model_of,
    release,
    start,
    turn,
    watch,
)
from tests.serving.scenarios import Report, Runner, scenario
from tests.serving.test_modes import start_mode

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.engine


@scenario
def feature_cache() -> Report:
    """Images held after each reset of vLLM's caches, -1 where none was held before."""
    llm = start({**STATE, "budget": 16})
    name, weight = next(iter(model_of(llm).named_parameters()))
    weights = {
        "weights_iterator": [(name, weight.detach().clone())],
        "is_checkpoint_format": False,
    }
    resets: dict[str, Callable[[], object]] = {
        "reset_mm_cache": llm.llm_engine.reset_mm_cache,
        "reset_encoder_cache": llm.llm_engine.reset_encoder_cache,
        "reload_weights": lambda: llm.collective_rpc("reload_weights", kwargs=weights),
    }
    held, cache = {}, model_of(llm).autoprune.cache
    # One question each, because vLLM's encoder cache would serve a repeated image.
    for (called, reset), example in zip(resets.items(), examples(2)[-3:], strict=True):
        llm.reset_prefix_cache()
        ask(llm, example)
        before = len(cache)
        with torch.no_grad():  # kernel-format weights are copied into parameters as they are
            reset()
        held[called] = len(cache) if before else -1
    return held


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
        entry = {"budget": 16, **({} if state is None else {"state": state})}
        (answer,) = chat(llm, [[turn(example.question, example.image)]], tokens=8, entry=entry)
        answers.append({**answer, "kept": [*seen.take().values()]})
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


def test_cache_resets_and_new_weights_clear_features(runner: Runner) -> None:
    held = runner.run("feature_cache")
    assert held == {"reset_mm_cache": 0, "reset_encoder_cache": 0, "reload_weights": 0}


@pytest.mark.exhaustive
def test_new_weights_from_disk_answer_as_a_new_engine(runner: Runner) -> None:
    report = runner.run("reloaded_weights")
    shipped, other = report["expected"]
    assert report["answers"] == [shipped, other, shipped]
    assert all(a["kept"] and a["kept"] != b["kept"] for a, b in zip(shipped, other, strict=True))
