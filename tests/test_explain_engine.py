"""explain on models that a vLLM engine serves: every region, and what was kept of it."""

from __future__ import annotations

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
    png,
)
from benchmarks.yardsticks.miniqwen import MiniQwen
from vllm_autoprune.checkpoint import open_vision
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import refine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def explain(checkpoint: Path, image: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, because vLLM keeps engine state until it ends."""
    command = ("-m", "vllm_autoprune.cli.main", "explain", str(image), "What is written?")
    return subprocess.run(
        [sys.executable, *command, "--checkpoint", str(checkpoint), "--json", *options],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=False,
    )


def read_regions(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr[-3000:]
    regions: list[dict[str, Any]] = json.loads(done.stdout)["regions"]
    return regions


def test_an_engine_keeps_what_transformers_inputs_give(tmp_path: Path) -> None:
    page = next(page for page in draw_examples("test", 2, "miniqwen") if page.image_id == 1)
    path, picture = tmp_path / "page.png", tmp_path / "why.png"
    as_picture(page.image).save(path)
    options = ("--state", "miniqwen", "--budget", "20", "-o", str(picture))
    done = explain(CHECKPOINTS["miniqwen"], path, *options)
    (region,) = read_regions(done)
    asked = [type(page)(**{**vars(page), "question": "What is written?"})]
    tokens = MiniQwen().encode(asked).tokens
    expected = set(refine(materialize(load_state("miniqwen"), 20), tokens).indices[0].tolist())
    # bfloat16 rounds differently in other kernels.
    assert len(region["kept"]) == 20 and len(expected & set(region["kept"])) >= 19
    assert region["grid"]["width"] * region["grid"]["height"] == tokens.count
    with Image.open(picture) as drawn:
        assert drawn.width > 1000


def test_the_picture_is_what_the_model_sees(tmp_path: Path) -> None:
    """mini-LLaVA's processor crops the margins away."""
    path, picture = tmp_path / "wide.png", tmp_path / "why.png"
    margins, wide = (255, 0, 255), Image.new("RGB", (336, 168), (255, 0, 255))
    wide.paste(Image.open(io.BytesIO(png(draw_examples("test", 1)[0].image))), (84, 0))
    wide.save(path)
    options = ("--text-tower", str(CLIP), "--state", "cdpruner", "--budget", "16")
    (region,) = read_regions(explain(LLAVA, path, *options, "-o", str(picture)))
    tokens = open_vision(LLAVA, CLIP).encode(wide, "What is written?")
    expected = set(refine(materialize(load_state("cdpruner"), 16), tokens).indices[0].tolist())
    # Tokens of a flat background are of nearly equal rank, and bfloat16 rounds differently.
    assert len(region["kept"]) == 16 and len(expected & set(region["kept"])) >= 12
    with Image.open(picture) as drawn:
        colours = drawn.getcolors(1 << 20)
        assert colours is not None and margins not in {colour for _, colour in colours}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "regions"), [("internvl", 1), ("llava_next", 2), ("gemma3", 1)])
def test_regions_and_tiles_share_the_budget(name: str, regions: int, tmp_path: Path) -> None:
    path, page = tmp_path / "wide.png", tmp_path / "why.png"
    Image.effect_mandelbrot((180, 112), (-2, -1, 1, 1), 50).convert("RGB").save(path)
    checkpoint = build(name, tmp_path / name)
    found = read_regions(explain(checkpoint, path, "--budget", "9", "-o", str(page)))
    assert len(found) == regions
    assert sum(len(region["kept"]) for region in found) == 9
    assert page.is_file()


@pytest.mark.exhaustive
def test_a_budget_that_keeps_everything_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "small.png"
    Image.new("RGB", (84, 84), "red").save(path)
    done = explain(CHECKPOINTS["miniqwen"], path, "--budget", "64")
    assert done.returncode == 1
    assert "keeps every token of this image" in done.stderr
