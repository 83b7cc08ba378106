"""The resize control against stock: images that a client has made smaller itself."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy
from PIL import Image

from tests.serving.engine import generate, release, start
from tests.serving.scenarios import Report, scenario
from vllm_autoprune.selftest.backbones import build

BACKBONES = ("qwen2_5_vl", "qwen3_vl")
BUDGETS = (9, 20, 30)
_PROMPT = "user <|vision_start|><|image_pad|><|vision_end|> what"


@scenario
def resized_images() -> Report:
    """By backbone: answers to a resized image, and to the same image shrunk by the client."""
    return {name: _ask_both(name) for name in BACKBONES}


def _ask_both(backbone: str) -> Report:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    noise = numpy.random.default_rng(0).integers(0, 255, (224, 168, 3), dtype=numpy.uint8)
    image = Image.fromarray(noise)
    with tempfile.TemporaryDirectory() as folder:
        llm = start(
            {"state": "divprune", "budget": 8, "requests": "states"},
            model=str(build(backbone, Path(folder))),
            dtype="float32",
            max_model_len=1024,
        )
        vision = llm.llm_engine.model_config.hf_config.vision_config
        unit = vision.patch_size * vision.spatial_merge_size
        sizes = [
            smart_resize(
                image.height, image.width, factor=unit, min_pixels=unit**2, max_pixels=k * unit**2
            )
            for k in BUDGETS
        ]
        shrunk = [
            image.resize((width, height), Image.Resampling.BICUBIC) for height, width in sizes
        ]
        control: list[dict[str, object]] = [{"budget": k, "keep": "resized"} for k in BUDGETS]
        off: list[dict[str, object]] = [{"enabled": False}] * len(BUDGETS)
        answers = {
            "resized": generate(llm, _prompts([image] * len(BUDGETS), control)),
            "shrunk": generate(llm, _prompts(shrunk, off)),
        }
        release(llm)
    return {name: [answer.plain() for answer in each] for name, each in answers.items()}


def _prompts(
    images: Sequence[Image.Image], entries: Sequence[dict[str, object]]
) -> list[dict[str, object]]:
    return [
        {
            "prompt": _PROMPT,
            "multi_modal_data": {"image": image},
            "mm_processor_kwargs": {"autoprune": entry},
        }
        for image, entry in zip(images, entries, strict=True)
    ]
