"""explain on models that a vLLM engine serves: every region, and what was kept of it."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.yardsticks.examples import (
    CHECKPOINTS,
    CLIP,
    LLAVA,
    as_picture,
    draw_examples,
)
from benchmarks.yardsticks.miniqwen import MiniQwen
from vllm_autoprune.checkpoint import LlavaVision
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.tokens import VisualTokens

pytestmark = pytest.mark.engine

QUESTION = "What is written?"


def explain(
    checkpoint: Path,
    image: Image.Image | None,
    folder: Path,
    *options: str,
    path: Path | None = None,
) -> Any:
    """Regions by the command in a process of its own, as vLLM keeps engine state until it ends."""
    path = path or folder / "image.png"
    if image is not None:
        image.save(path)
    command = ("-m", "vllm_autoprune", "explain", str(path), QUESTION, "--json")
    done = subprocess.run(
        [sys.executable, *command, "--checkpoint", str(checkpoint), *options],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=False,
    )
    record = json.loads(done.stdout)
    return record["regions"] if done.returncode == 0 else record["message"]


def count_equal(region: Any, tokens: VisualTokens, state: str, budget: int) -> int:
    indices = refine(materialize(load_state(state), budget), tokens).indices[0].tolist()
    assert len(region["kept"]) == budget
    assert region["grid"]["width"] * region["grid"]["height"] == tokens.count
    return len(set(indices) & set(region["kept"]))


def test_an_engine_keeps_what_transformers_inputs_give(tmp_path: Path) -> None:
    page = next(
        page for page in draw_examples("test", 2, "miniqwen") if page.image_id == 1
    )
    # Its K follows from N.
    options = ("--state", "miniqwen")
    (region,) = explain(
        CHECKPOINTS["miniqwen"], as_picture(page.image), tmp_path, *options
    )
    tokens = MiniQwen().encode([dataclasses.replace(page, question=QUESTION)]).tokens
    # bfloat16 rounds differently in other kernels.
    assert (
        count_equal(region, tokens, "miniqwen", tokens.count // 8)
        >= tokens.count // 8 - 1
    )


def test_the_picture_is_what_the_model_sees(tmp_path: Path) -> None:
    """mini-LLaVA's processor crops the margins away."""
    margins = (255, 0, 255)
    wide = Image.new("RGB", (336, 168), (255, 0, 255))
    wide.paste(Image.open(io.BytesIO(draw_examples("test", 1)[0].png)), (84, 0))
    options = ("--text-tower", str(CLIP), "--state", "cdpruner", "--budget", "16")
    (region,) = explain(
        LLAVA, wide, tmp_path, *options, "-o", str(tmp_path / "why.png")
    )
    # Tokens of a flat background are of nearly equal rank, and bfloat16 rounds differently.
    tokens = LlavaVision(LLAVA, CLIP).encode(wide, QUESTION)
    assert count_equal(region, tokens, "cdpruner", 16) >= 12
    with Image.open(tmp_path / "why.png") as drawn:
        colours = drawn.getcolors(1 << 20)
        assert drawn.width > 800 and colours is not None
        assert margins not in {colour for _, colour in colours}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "regions"), [("internvl", 1), ("llava_next", 2), ("gemma3", 1)]
)
def test_regions_and_tiles_share_the_budget(
    name: str, regions: int, tmp_path: Path
) -> None:
    wide = Image.effect_mandelbrot((180, 112), (-2, -1, 1, 1), 50).convert("RGB")
    checkpoint = build(name, tmp_path / name)
    picture = tmp_path / "why.png"
    records = explain(checkpoint, wide, tmp_path, "--budget", "9", "-o", str(picture))
    assert len(records) == regions and picture.is_file()
    assert sum(len(region["kept"]) for region in records) == 9


@pytest.mark.exhaustive
def test_a_budget_that_keeps_everything_is_answered(tmp_path: Path) -> None:
    small = Image.new("RGB", (84, 84), "red")
    message = explain(CHECKPOINTS["miniqwen"], small, tmp_path, "--budget", "64")
    assert "keeps every token of this image" in message


@pytest.mark.exhaustive
def test_a_clip_is_explained_by_its_frames(tmp_path: Path) -> None:
    checkpoint = build("qwen2_5_vl", tmp_path / "tiny")
    frames = tmp_path / "frames"
    frames.mkdir()
    for number in range(4):
        noise = Image.effect_noise((56, 84), 20 * (number + 1)).convert("RGB")
        noise.save(frames / f"{number}.png")
    options = ("--budget", "tokens_per_frame:2", "-o", str(tmp_path / "strip.png"))
    (region,) = explain(checkpoint, None, tmp_path, *options, path=frames)
    assert region["grid"]["video"] and region["grid"]["tiles"] == 2
    assert sum(region["kept_by_frame"]) == len(region["kept"]) == 4
    assert (tmp_path / "strip.png").is_file()
