"""Every backbone on both model runners: selftest, encoder graphs, the resize control."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy
import pytest
import torch
from _pytest.mark import ParameterSet
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from tests.serving.engine import (
    LLAVA,
    alone,
    assert_same,
    built,
    raw_prompt,
    start,
    turn,
    watch,
)
from tests.serving.runners import Result, Runner, in_engine
from vllm_autoprune.selftest import serve
from vllm_autoprune.selftest.backbones import ORIGINAL, TINY_MODELS, build
from vllm_autoprune.selftest.checks import CHECKS, runners_agree
from vllm_autoprune.selftest.questions import make_settings, picture
from vllm_autoprune.selftest.run import Report
from vllm_autoprune.serving.models import BACKBONES

pytestmark = pytest.mark.engine


LIKE_ANOTHER = (
    "qwen3_vl_moe",
    "qwen3_5_moe",
    "qwen3_omni_moe",
    "cosmos3_omni",
    "cosmos3_edge",
    "cohere_compass",
    "glm4v",
    "glm4v_moe",
    "smolvlm",
    "interns1",
    "qianfan_ocr",
    "skywork_chat",
    "dots_ocr",
    "cohere2_vision",
    "llama4",
    "nvlm_d",
    "ovis2_6_moe",
    "step3p7",
    "step3",
    "exaone4_5",
)
"""Share the code that prunes with another backbone: left to `make test-all`."""
ON_BOTH_RUNNERS = ("llava", "llava_onevision", "qwen2_5_vl", "qwen3_vl")
"""Tiles, M-RoPE and deepstack, which the model runners handle each in its own way; `make test`
serves the other backbones by V1."""

WITHOUT_VIDEO = (
    "llava",
    "llava_next",
    "cohere_compass",
    "idefics3",
    "smolvlm",
    "mistral3",
    "gemma3",
    "qianfan_ocr",
    "skywork_chat",
    "paddleocr_vl",
    "lightonocr",
    "dots_ocr",
    "cohere2_vision",
    "lfm2_vl",
    "llama4",
    "nvlm_d",
    "step_vl",
    "step3p7",
    "step3",
)
"""Their models, or vLLM's classes for them, take no videos."""

NAMES = ["llava", *TINY_MODELS]
"""LLaVA is the trained mini-LLaVA, the others are tiny random models."""


def names(quick: Collection[str]) -> list[ParameterSet]:
    """All backbones as parameters, exhaustive but for the quick ones."""
    slow = pytest.mark.exhaustive
    return [pytest.param(name, marks=() if name in quick else slow) for name in NAMES]


def examine(name: str) -> Result:
    """The selftest's report of a backbone, as it is printed."""
    with TemporaryDirectory() as folder:
        report = serve.serve(LLAVA if name == "llava" else build(name, Path(folder)))
    return json.loads(report.model_dump_json())


def assert_checks_pass(name: str, runner: Runner) -> Report:
    report = Report.model_validate(runner.run(examine, name=name))
    assert {check: CHECKS[check](report) for check in CHECKS} == dict.fromkeys(
        CHECKS, ""
    )
    assert report.runner == runner.name
    backbone = next(
        backbone for backbone in BACKBONES.values() if backbone.name == name
    )
    axes = {len(completion.positions) for completion in report["stock"].values()}
    assert axes == {3 if backbone.mrope else 1}
    assert ("video" in report["stock others"]) == (name not in WITHOUT_VIDEO)
    assert bool(report["videos"]) == backbone.videos
    return report


@pytest.mark.only("v1")
@pytest.mark.reads.with_args(examine)
@pytest.mark.parametrize("name", names({*NAMES} - {*LIKE_ANOTHER}))
def test_selftest_checks_pass(runner: Runner, name: str) -> None:
    if name.startswith("qwen3_5") and os.getenv("ONEDNN_MAX_CPU_ISA"):
        pytest.skip(
            "vLLM's linear attention asks the CPU itself, and oneDNN then refuses"
        )
    assert_checks_pass(name, runner)


@pytest.mark.only("v2")
@pytest.mark.reads.with_args(examine)
@pytest.mark.parametrize("name", names(ON_BOTH_RUNNERS))
def test_selftest_checks_pass_on_both_model_runners(runner: Runner, name: str) -> None:
    """Both keep the same rows and positions, and give the same answers."""
    v1 = Report.model_validate(Runner("v1").run(examine, name=name))
    assert runners_agree(v1, assert_checks_pass(name, runner)) == ""


@in_engine
def test_a_backbone_of_a_known_kind_takes_a_row_and_a_tiny_model() -> None:
    """A class of another package passes the whole self-test, and the plugin is as it is."""
    from vllm.model_executor.models import ModelRegistry

    with patch.dict(BACKBONES), patch.dict(ModelRegistry.models):
        from tests.serving import added_backbone as added

        name = added.ARCHITECTURE
        ModelRegistry.register_model(name, f"{added.__name__}:{name}")
        with (
            patch.dict(TINY_MODELS, {"added": added.TINY_MODEL}),
            TemporaryDirectory() as folder,
        ):
            report = serve.serve(build("added", Path(folder)))
    failures = {check: CHECKS[check](report) for check in CHECKS}
    assert failures == dict.fromkeys(CHECKS, "")
    assert report.kept and report.video and report.placed


@pytest.mark.parametrize("backbone", ["qwen2_5_vl", "qwen3_vl"])
@in_engine
def test_a_resized_image_is_answered_as_one_that_the_client_has_shrunk(
    backbone: str,
) -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    noise = numpy.random.default_rng(0).integers(
        0, 255, (224, 168, 3), dtype=numpy.uint8
    )
    image = Image.fromarray(noise)
    settings = {"state": "divprune", "budget": 8, "requests": "states"}
    engine = start(settings, model=built(backbone), dtype="float32", max_model_len=1024)
    vision = engine.llm.llm_engine.model_config.hf_config.vision_config
    unit = vision.patch_size * vision.spatial_merge_size
    text = "user <|vision_start|><|image_pad|><|vision_end|> what"
    resized = []
    shrunk = []
    for k in (9, 20, 30):
        limits = {"min_pixels": unit**2, "max_pixels": k * unit**2}
        height, width = smart_resize(image.height, image.width, factor=unit, **limits)
        small = image.resize((width, height), Image.Resampling.BICUBIC)
        shrunk.append(raw_prompt(text, small, enabled=False))
        resized.append(raw_prompt(text, image, budget=k, keep="resized"))
    answers = engine.generate(resized)
    assert len({answer["text"] for answer in answers}) > 1, "sizes should matter"
    assert_same(answers, engine.generate(shrunk))


@pytest.mark.parametrize("backbone", ["idefics3", "smolvlm"])
@in_engine
def test_free_shares_follow_the_tile_that_shows_something(backbone: str) -> None:
    """Of four tiles and the whole image, which comes first; equal shares keep K / T of each."""
    engine = start(
        {"state": "divprune", "budget": 10, "requests": "states"},
        built(backbone),
        dtype="float32",
    )
    record = watch()
    side = TINY_MODELS[backbone]["pixels"]["size"]["longest_edge"]
    for number in range(4):
        pixels = numpy.full((side, side, 3), 128, dtype=numpy.uint8)
        half = side // 2
        row, column = divmod(number, 2)
        noise = numpy.random.default_rng(number).integers(0, 255, (half, half, 3))
        pixels[row * half :, column * half :][:half, :half] = noise
        talk = [turn("what colour is the cat", Image.fromarray(pixels))]
        lengths = []
        for shares in ("equal", "free"):
            state = {**alone("divprune"), "shares": shares}
            (answer,) = engine.chat(talk, entry={"state": state, "budget": 10})
            (indices,) = record.take().values()
            counts = [sum(token // 9 == tile for token in indices) for tile in range(5)]
            assert sum(counts) == 10
            assert counts[1 + number] > 6 if shares == "free" else counts == [2] * 5
            lengths.append(answer["prompt_tokens"])
        (unpruned,) = engine.chat(talk, entry={"enabled": False})
        assert lengths == [unpruned["prompt_tokens"] - 5 * 9 + 10] * 2


@pytest.mark.parametrize(
    ("backbone", "tokens"), [("qwen2_5_omni", 132), ("qwen3_omni_moe", 90)]
)
@in_engine
def test_audio_beside_a_pruned_image_is_untouched(backbone: str, tokens: int) -> None:
    """The same rows of it, whatever K is; with K >= N the answer of the whole image."""
    engine = start(
        {"state": "cen_divprune", "budget": 8, "requests": "budget"},
        model=built(backbone),
        dtype="float32",
        max_model_len=1024,
        limit_mm_per_prompt={"image": 1, "audio": 1, "video": 0},
    )
    sounds: list[Tensor] = []
    model, embed = engine.model, engine.model.embed_multimodal

    def record(**inputs: object) -> object:
        rows = embed(**inputs)
        sounds.extend(rows if "input_audio_features" in inputs else ())
        return rows

    model.embed_multimodal = record
    audio, image = (model.get_placeholder_str(kind, 1) for kind in ("audio", "image"))
    noise = numpy.random.default_rng(0).normal(size=16000)
    answers = []
    for entry in ({"enabled": False}, {"budget": tokens}, {"budget": 8}):
        engine.empty_caches()
        request = raw_prompt(
            f"user {audio} {image} what is blue you", picture(330, 300, 4), **entry
        )
        request["multi_modal_data"]["audio"] = (noise, 16000)
        answers += engine.generate([request])
    unpruned, kept_all, pruned = answers
    assert kept_all == unpruned
    assert pruned["prompt_tokens"] == unpruned["prompt_tokens"] - tokens + 8
    assert pruned["logprob"] != unpruned["logprob"]
    assert len(sounds) == 3 and torch.equal(sounds[0], sounds[1])
    assert torch.equal(sounds[0], sounds[2])


@in_engine
def test_what_ranks_tokens_of_dots_ocr_enters_its_merger() -> None:
    """Of transformers' Qwen2.5-VL, with what dots.ocr has besides: an embedding and two norms."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = built("dots_ocr")
    state = {**alone("divprune"), "rank_at": "merger_in"}
    engine = start({"state": state, "budget": 8}, folder, dtype="float32")
    processor = AutoProcessor.from_pretrained(folder).image_processor
    inputs = processor([picture(330, 300, 4)], return_tensors="pt")
    vision = engine.model.autoprune
    (image,) = vision.images(inputs)
    (region,) = vision.encode([image.inputs])[0].regions

    original = AutoModelForImageTextToText.from_pretrained(
        folder / ORIGINAL, dtype=torch.float32
    )
    tower = original.model.visual
    weights = load_file(folder / "model.safetensors")
    entering: list[Tensor] = []

    def read(name: str) -> Tensor:
        return weights[f"vision_tower.{name}"].float()

    def embed(pixels: Tensor) -> Tensor:
        patchifier = "patch_embed.patchifier"
        matrix = read(f"{patchifier}.proj.weight").flatten(1)
        patches = functional.linear(pixels, matrix, read(f"{patchifier}.proj.bias"))
        return functional.rms_norm(
            patches, (64,), read(f"{patchifier}.norm.weight"), 1e-6
        )

    def record(_: nn.Module, args: tuple[Tensor]) -> None:
        norm = functional.rms_norm(args[0], (64,), read("post_trunk_norm.weight"), 1e-6)
        entering.append(norm.unflatten(0, (-1, 4)))

    tower.patch_embed.forward = embed
    tower.merger.register_forward_pre_hook(record)
    with torch.no_grad():
        tower(inputs["pixel_values"], inputs["image_grid_thw"])
    (patches,) = entering
    norms = torch.stack([patches.norm(1, dim=2), patches.norm(dim=2)], dim=2)
    torch.testing.assert_close(
        region.signals["encoder"], patches.mean(dim=1), rtol=1e-3, atol=1e-3
    )
    torch.testing.assert_close(
        region.signals["merger_norms"], norms.mean(dim=1), rtol=1e-3, atol=1e-3
    )


@in_engine
def test_attention_of_ovis_is_in_the_order_of_its_tokens() -> None:
    """Its tower has patches in the order of windows, and ends by taking them back out of it."""
    engine = start(make_settings(8), built("ovis2_5"), dtype="float32")
    tower = engine.model.visual_tokenizer.vit.vision_model.encoder
    in_windows: list[Tensor] = []
    in_order: list[Tensor] = []
    last = tower.layers[-1]
    last.register_forward_hook(lambda *call: in_windows.append(call[2]))
    tower.register_forward_hook(lambda *call: in_order.append(call[2]))
    vision = engine.model.autoprune
    received: list[Tensor] = []
    merge = vision.merge_patches

    def record(patches: Tensor, grids: Tensor) -> Tensor:
        received.append(patches)
        return merge(patches, grids)

    vision.merge_patches = record
    engine.chat([turn("what is it", picture(330, 300, 4))])
    (features,) = vision.cache._entries.values()
    order = torch.cdist(in_order[-1], in_windows[-1]).argmin(dim=1)
    assert not torch.equal(order, torch.arange(len(order)))
    expected = received[-1][order].unflatten(0, (-1, 4)).mean(dim=1)
    torch.testing.assert_close(
        features.regions[0].signals["cls_attention"], expected, rtol=1e-4, atol=1e-6
    )
