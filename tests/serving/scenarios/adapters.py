"""LoRA adapters of the language model beside pruned images."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.yardsticks.adapters import ADAPTERS, draw_adapter, write_adapters
from tests.serving.engine import examples, forget, release, vision_runs
from tests.serving.interleave import render_prompt
from tests.serving.paths import LLAVA
from tests.serving.scenarios import Report, scenario
from tests.serving.scenarios.modes import REQUESTS, complete, start_mode

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest


@scenario
def lora_mode() -> Report:
    """Two adapters of the language model and none, on one image and on others.

    ``together``: every adapter's answers to every question in one batch, interleaved; ``alone``:
    each with empty caches; ``merged``: by models whose weights contain the adapter. ``cached``:
    cached tokens of a second question round; ``runs`` of the vision tower for one image.
    """
    from vllm.lora.request import LoRARequest

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_adapters(folder)
        loras: dict[str | None, LoRARequest | None] = {
            None: None,
            **{
                name: LoRARequest(name, at, str(folder / name))
                for at, name in enumerate(ADAPTERS, 1)
            },
        }
        # On a CPU vLLM gives a request without an adapter that of the last slot, so one stays free.
        llm = start_mode(enable_lora=True, max_loras=3, max_lora_rank=8)
        report = _adapted(llm, loras)
        release(llm)
        report["merged"] = []
        for adapter in ADAPTERS:
            merged = _merge_adapter(folder, adapter)
            llm = start_mode(model=str(merged))
            report["merged"].append(complete(llm, _asked()))
            release(llm)
        return report


def _asked() -> list[dict[str, object]]:
    questions = examples(6)
    keys = [key for key in REQUESTS if key[2] is None or "core" in key[2]]
    return [render_prompt(questions, *key) for key in keys]


def _adapted(llm: LLM, loras: Mapping[str | None, LoRARequest | None]) -> dict[str, Any]:
    asked = _asked()
    pairs = [(one, lora) for one in asked for lora in loras.values()]
    sent, by = [one for one, _ in pairs], [lora for _, lora in pairs]
    report: dict[str, Any] = {"together": complete(llm, sent, lora_request=by), "alone": []}
    for one, lora in pairs:
        forget(llm)
        report["alone"] += complete(llm, [one], lora_request=[lora])
    forget(llm)
    runs = vision_runs(llm)
    report["cached"] = []
    for lora in (*loras.values(), *loras.values()):
        report["cached"].append(_cached(llm, asked[0], lora))
    report["runs"] = vision_runs(llm) - runs
    return report


def _cached(llm: LLM, one: Mapping[str, object], lora: LoRARequest | None) -> int:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1)
    (output,) = llm.generate([one], sampling, use_tqdm=False, lora_request=[lora])
    return int(output.num_cached_tokens or 0)


def _merge_adapter(folder: Path, adapter: str) -> Path:
    """mini-LLaVA with an adapter added to its weights."""
    merged = folder / f"merged-{adapter}"
    shutil.copytree(LLAVA, merged)
    weights = load_file(merged / "model.safetensors")
    for module, (down, up) in draw_adapter(ADAPTERS.index(adapter)).items():
        name = f"{module}.weight"
        weights[name] = (weights[name].float() + up @ down).to(torch.float32)
    (merged / "model.safetensors").unlink()
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    return merged
