"""LoRA adapters of mini-LLaVA's language model, with random weights, as PEFT saves them."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.yardsticks.examples import LLAVA

ADAPTERS = ("first", "second")

_RANK = 8
_MODULES = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def write_adapters(folder: Path) -> tuple[str, ...]:
    """Write each adapter to a folder of its name; returns flags of a server with all of them."""
    model = json.loads((LLAVA / "config.json").read_text())["text_config"]
    hidden = model["hidden_size"]
    modules = sorted(module.rpartition(".")[2] for module in _MODULES)
    config = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": _RANK,
        "target_modules": modules,
        "bias": "none",
    }
    for seed, name in enumerate(ADAPTERS):
        random = torch.Generator().manual_seed(seed)
        tensors = dict[str, torch.Tensor]()
        for layer, module in product(range(model["num_hidden_layers"]), _MODULES):
            width = model["intermediate_size"] if module == "mlp.down_proj" else hidden
            down = torch.randn(_RANK, width, generator=random) / width**0.5
            up = torch.randn(hidden, _RANK, generator=random) / _RANK**0.5
            prefix = f"base_model.model.language_model.model.layers.{layer}.{module}"
            tensors |= {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
        (folder / name).mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / name / "adapter_model.safetensors")
        (folder / name / "adapter_config.json").write_text(json.dumps(config))
    # On a CPU, vLLM applies the adapter of the last slot to a request without an adapter, so that
    # slot stays free.
    slots = str(len(ADAPTERS) + 1)
    return (
        "--enable-lora",
        "--max-loras",
        slots,
        "--max-lora-rank",
        str(_RANK),
        "--lora-modules",
        *(f"{name}={folder / name}" for name in ADAPTERS),
    )
