"""New weights for a running engine, from disk: vLLM's ``reload_weights`` in checkpoint format."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

from tests.serving.engine import chat, examples, forget, release, turn
from tests.serving.paths import LLAVA
from tests.serving.scenarios import Report, scenario
from tests.serving.scenarios.modes import start_mode
from tests.serving.selection_recorder import Watch, watch

if TYPE_CHECKING:
    from vllm import LLM

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
