"""The true-width model folder, as transformers reads it, and KV bytes computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoProcessor

from benchmarks.common.shapes import (
    IMAGE_TOKEN,
    TOKENS,
    VOCABULARY,
    count_visual_tokens,
    draw_words,
    read_kv_layout,
    write_llava,
    write_llava_next,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava(tmp_path_factory.mktemp("shape") / "llava", layers=3)


def test_widths_are_those_of_llava_7b(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    text, vision = config.text_config, config.vision_config

    assert (text.hidden_size, text.intermediate_size, text.num_attention_heads) == (4096, 11008, 32)
    assert (text.num_hidden_layers, text.vocab_size) == (3, VOCABULARY)
    assert (vision.hidden_size, vision.num_hidden_layers, vision.num_attention_heads) == (
        1024, 24, 16,
    )  # fmt: skip
    assert (vision.image_size // vision.patch_size) ** 2 == TOKENS
    assert config.image_token_index == IMAGE_TOKEN


def test_a_narrow_shape_keeps_its_proportions(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(
        write_llava(tmp_path / "narrow", 4, tower_layers=2, width=2048)
    )
    text = config.text_config

    assert (text.hidden_size, text.intermediate_size, text.num_attention_heads) == (2048, 5504, 16)
    assert (text.num_hidden_layers, config.vision_config.num_hidden_layers) == (4, 2)
    with pytest.raises(ValueError, match="a multiple of 128"):
        write_llava(tmp_path / "odd", 4, width=1000)


def test_there_are_no_weights(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.iterdir()) < 5 << 20


def test_an_image_is_n_tokens_and_a_word_is_one(folder: Path) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    parts = [{"type": "image"}, {"type": "text", "text": draw_words(24, 5)}]
    prompt = processor.apply_chat_template([{"role": "user", "content": parts}])
    ids = processor.tokenizer(prompt)["input_ids"]

    assert ids.count(IMAGE_TOKEN) == 1
    assert processor.tokenizer.unk_token_id not in ids
    text = [{"role": "user", "content": draw_words(64 + 24, 6)}]
    as_long = processor.tokenizer(processor.apply_chat_template(text))["input_ids"]
    assert len(as_long) == len(ids) - 1 + 64


def test_every_id_has_a_text(folder: Path) -> None:
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer

    assert len(tokenizer) == VOCABULARY
    assert all(tokenizer.convert_ids_to_tokens(list(range(VOCABULARY))))


def test_a_tiled_shape_has_the_published_pinpoints(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(write_llava_next(tmp_path / "next", 1))

    assert [672, 672] in [list(pair) for pair in config.image_grid_pinpoints]


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
