"""What is sent and served without weights: pictures like photographs, models of true widths."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoConfig, AutoProcessor

from benchmarks.common.requests import draw_picture, encode_picture
from benchmarks.common.shapes import (
    TOKENS,
    count_kv_bytes,
    count_visual_tokens,
    draw_words,
    write_llava,
    write_llava_next,
)

SIDE = 256


def measure_slope(pixels: NDArray[np.float64]) -> float:
    """Exponent of the power spectrum over spatial frequency; photographs lie near -2."""
    spectrum = np.abs(np.fft.fftshift(np.fft.fft2(pixels - pixels.mean()))) ** 2
    down, right = np.indices(spectrum.shape) - SIDE // 2
    ring = np.hypot(down, right).astype(int).ravel()
    power = np.bincount(ring, spectrum.ravel()) / np.bincount(ring)
    band = np.arange(4, 64)
    return float(np.polyfit(np.log(band), np.log(power[band]), 1)[0])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pictures_have_the_statistics_of_photographs(seed: int) -> None:
    picture = draw_picture(seed, SIDE, SIDE)
    noise = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    assert -3.2 < measure_slope(np.asarray(picture.convert("L"), dtype=np.float64)) < -1.6
    assert abs(measure_slope(noise[..., 0].astype(np.float64))) < 0.2
    # Codecs find redundancy in them.
    sizes = [len(encode_picture(i, "jpeg")) for i in (picture, Image.fromarray(noise))]
    assert 2 * sizes[0] < sizes[1]


def test_the_seed_determines_every_pixel_and_a_data_url_contains_them() -> None:
    pixels = np.asarray(draw_picture(7, 80, 60))
    assert pixels.shape == (60, 80, 3) and (pixels != np.asarray(draw_picture(8, 80, 60))).any()
    head, _, data = encode_picture(draw_picture(7, 80, 60)).partition(",")
    decoded = Image.open(io.BytesIO(base64.b64decode(data)))
    assert head == "data:image/png;base64" and decoded.format == "PNG"
    assert (np.asarray(decoded) == pixels).all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava(tmp_path_factory.mktemp("shape") / "llava", layers=3)


def test_widths_are_those_of_llava_7b_without_weights(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    text, vision = config.text_config, config.vision_config
    assert (text.hidden_size, text.intermediate_size, text.num_attention_heads) == (4096, 11008, 32)
    assert (text.num_hidden_layers, text.vocab_size) == (3, 32064)
    tower = (vision.hidden_size, vision.num_hidden_layers, vision.num_attention_heads)
    assert tower == (1024, 24, 16)
    assert (vision.image_size // vision.patch_size) ** 2 == TOKENS == count_visual_tokens(folder)
    assert config.image_token_index == 32000
    # A key and a value of 32 heads x 128 numbers in each of three layers, two bytes each.
    assert count_kv_bytes(folder, "bfloat16") == 2 * 3 * 4096 * 2
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
    assert ids.count(32000) == 1
    assert processor.tokenizer.unk_token_id not in ids
    text = [{"role": "user", "content": draw_words(64 + 24, 6)}]
    as_long = processor.tokenizer(processor.apply_chat_template(text))["input_ids"]
    assert len(as_long) == len(ids) - 1 + 64
    # Every id has a text, since dummy weights emit any.
    assert len(processor.tokenizer) == 32064
    assert all(processor.tokenizer.convert_ids_to_tokens(list(range(32064))))


def test_a_tiled_shape_has_the_published_pinpoints(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(write_llava_next(tmp_path / "next", 1))
    assert [672, 672] in [list(pair) for pair in config.image_grid_pinpoints]
