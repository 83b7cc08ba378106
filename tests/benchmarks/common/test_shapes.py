"""The true-width model folders, as transformers reads them, and KV bytes computed by hand."""

from __future__ import annotations

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


def test_widths_are_those_of_llava_7b_without_weights(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    text, vision = config.text_config, config.vision_config
    assert (text.hidden_size, text.intermediate_size, text.num_attention_heads) == (4096, 11008, 32)
    assert (text.num_hidden_layers, text.vocab_size) == (3, VOCABULARY)
    tower = (vision.hidden_size, vision.num_hidden_layers, vision.num_attention_heads)
    assert tower == (1024, 24, 16)
    assert (vision.image_size // vision.patch_size) ** 2 == TOKENS == count_visual_tokens(folder)
    assert config.image_token_index == IMAGE_TOKEN
    # A key and a value of 32 heads x 128 numbers in each of three layers, two bytes each.
    layout = read_kv_layout(folder, "bfloat16")
    assert layout.bytes_per_token == 2 * 3 * 4096 * 2
    assert layout.formula.endswith(f"= prompt tokens x {layout.bytes_per_token}")
    assert sum(path.stat().st_size for path in folder.iterdir()) < 5 << 20


def test_a_narrow_shape_keeps_its_proportions(tmp_path: Path) -> None:
    path = write_llava(tmp_path / "narrow", 4, tower_layers=2, width=2048)
    config = AutoConfig.from_pretrained(path)
    text = config.text_config
    assert (text.hidden_size, text.intermediate_size, text.num_attention_heads) == (2048, 5504, 16)
    assert (text.num_hidden_layers, config.vision_config.num_hidden_layers) == (4, 2)
    with pytest.raises(ValueError, match="a multiple of 128"):
        write_llava(tmp_path / "odd", 4, width=1000)


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
    # Every id has a text, since dummy weights emit any.
    assert len(processor.tokenizer) == VOCABULARY
    assert all(processor.tokenizer.convert_ids_to_tokens(list(range(VOCABULARY))))


def test_a_tiled_shape_has_the_published_pinpoints(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(write_llava_next(tmp_path / "next", 1))
    assert [672, 672] in [list(pair) for pair in config.image_grid_pinpoints]
