"""Conversion to LLaVA-NeXT: same weights, and five tiles for an image of twice the size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoProcessor, LlavaNextForConditionalGeneration

from benchmarks.minillava.any_resolution import convert_to_llava_next
from benchmarks.minillava.layout import Canvas
from benchmarks.minillava.split import held_out
from benchmarks.minillava.vocabulary import prompt


@pytest.fixture(scope="module")
def tiled(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("next")
    convert_to_llava_next(checkpoint / "llava", folder)
    return folder


def test_weights_are_those_of_the_checkpoint(checkpoint: Path, tiled: Path) -> None:
    before = load_file(checkpoint / "llava" / "model.safetensors")
    after = load_file(tiled / "model.safetensors")

    assert set(after) - set(before) == {"image_newline"}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not after["image_newline"].any()


def test_a_large_image_becomes_five_tiles_and_is_answered(tiled: Path) -> None:
    processor = AutoProcessor.from_pretrained(tiled)
    model, loaded = LlavaNextForConditionalGeneration.from_pretrained(
        tiled, dtype=torch.bfloat16, output_loading_info=True
    )
    example = held_out("search", 1, Canvas(8))[0]
    image = Image.fromarray(example.image.permute(1, 2, 0).numpy())
    inputs = processor(images=image, text=prompt(example.question), return_tensors="pt")
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    visual = int((inputs.input_ids == processor.image_token_id).sum())
    with torch.no_grad():
        generated = model.generate(**inputs, max_new_tokens=1, do_sample=False)

    assert not loaded["missing_keys"]
    assert inputs["pixel_values"].shape[1] == 5
    # The base view, the four tiles side by side, and a newline after each of their 24 rows.
    assert visual == 144 + 24 * 24 + 24
    assert generated.shape[1] == inputs.input_ids.shape[1] + 1
