"""What the benchmark of dropped cells serves."""

from __future__ import annotations

import pytest

from benchmarks.common.shapes import _read_shape
from vllm_autoprune.backbones import count_tower_flops


def test_the_scaled_tower_has_its_share_of_the_cost() -> None:
    """Of tower and prefill of an eighth, with 24 words, 85 % as Qwen3-VL-8B's."""
    from transformers import AutoConfig

    shape = _read_shape("scaled-qwen3-vl")
    config = AutoConfig.for_model(
        "qwen3_vl", vision_config=shape["vision"], text_config=shape["text"]
    )
    tower, text, tokens = count_tower_flops(config, 962), shape["text"], 962 // 8 + 24
    width, head = text["hidden_size"], text["head_dim"]
    queries, keys = (head * text[f"num_{name}_heads"] for name in ("attention", "key_value"))
    matrices = width * (2 * queries + 2 * keys + 3 * text["intermediate_size"])
    prefill = 2 * text["num_hidden_layers"] * tokens * (matrices + 2 * tokens * queries)
    attention = 2 * 2 * (4 * 962) ** 2 * config.vision_config.hidden_size * 4
    assert tower / (tower + prefill) == pytest.approx(0.85, abs=0.01)
    assert attention / tower == pytest.approx(0.68, abs=0.02)
