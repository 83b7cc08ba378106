"""KV bytes against values computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.demo.kv_cache import count_visual_tokens, read_kv_layout


def _write(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_bytes_of_a_token_count_a_key_and_a_value_in_every_layer(tmp_path: Path) -> None:
    text = {
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "head_dim": 32,
    }
    layout = read_kv_layout(_write(tmp_path, {"text_config": text}), dtype="bfloat16")

    # 4 layers x (6 x 32 numbers of a key + as many of a value) x 2 bytes
    assert layout.bytes_per_token == 4 * (192 + 192) * 2 == 3072
    assert layout.formula.endswith("= prompt tokens x 3072")


def test_grouped_heads_and_a_derived_head_size(tmp_path: Path) -> None:
    text = {
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 128,
    }

    layout = read_kv_layout(_write(tmp_path, {"text_config": text}), dtype="float32")

    assert layout.bytes_per_token == 2 * 2 * 2 * 16 * 4


def test_kv_heads_default_to_attention_heads(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64}

    assert read_kv_layout(_write(tmp_path, text)).kv_heads == 4


def test_a_config_without_sizes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_attention_heads = None"):
        read_kv_layout(_write(tmp_path, {"text_config": {}}))


def test_visual_tokens_are_the_patches_of_one_image(tmp_path: Path) -> None:
    vision = {"image_size": 168, "patch_size": 14}

    assert count_visual_tokens(_write(tmp_path, {"vision_config": vision})) == 144
