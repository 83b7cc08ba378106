"""Every backbone as a tiny random model: stock, with every token kept, pruned, in small steps.

Knows nothing about what should be equal. One process a backbone, since imports take longest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor

from tests.serving.engine import forget, model_of, released, turn
from tests.serving.scenarios import SCENARIOS, Report
from tests.serving.watch import watch
from vllm_autoprune.selftest.tiny import BUILDERS, build

MANY = 4096
"""A budget that keeps every token."""

FEW = 5
"""A budget below N of every image here."""

SETTINGS = {"state": "autoprune", "budget": MANY, "requests": "budget"}


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Coloured blocks."""
    source = numpy.random.default_rng(seed)
    blocks = source.integers(0, 255, (height // 8, width // 8, 3), dtype=numpy.uint8)
    return Image.fromarray(blocks).resize((width, height))


SQUARE, WIDE = picture(112, 112, 0), picture(200, 112, 1)
LARGE = picture(330, 300, 4)
HIGH, SMALL = picture(96, 208, 2), picture(120, 96, 3)
_LONG = " and the sky is blue on the right" * 6
"""So that the image and some of the text fill a block of the prefix cache."""

ASKED: dict[str, tuple[str, tuple[Image.Image, ...]]] = {
    "square": ("what colour is the cat", (SQUARE,)),
    "wide": ("what colour is the cat", (WIDE,)),
    "high": ("what colour is the cat", (HIGH,)),
    "large": ("what colour is the cat", (LARGE,)),
    "two": ("how many are there", (HIGH, SMALL)),
    "other question": ("which dog is on the left", (WIDE,)),
}


@dataclass
class Steps:
    """What the language model was given, one prefill step after another."""

    positions: list[Tensor] = field(default_factory=list)

    def note(self, module: object, given: Sequence[object], named: dict[str, Any]) -> None:
        positions = named["positions"] if "positions" in named else given[0]
        assert isinstance(positions, Tensor)
        self.positions.append(positions.clone())

    def take(self, length: int) -> list[list[int]]:
        """Positions of the prompt ``(3, L)``, or ``(1, L)``, and of what was decoded after it."""
        joined = torch.cat(self.positions, dim=-1)
        self.positions.clear()
        return joined.reshape(-1, joined.shape[-1])[:, :length].tolist()


def _engine(folder: Path, settings: dict[str, object] | None, **options: object) -> Any:
    from vllm import LLM

    more = {} if settings is None else {"additional_config": {"autoprune": settings}}
    return LLM(
        model=str(folder),
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=1024,
        block_size=32,
        num_gpu_blocks_override=128,
        limit_mm_per_prompt={"image": 4},
        **more,
        **options,
    )


def _asked(llm: Any, steps: Steps, name: str, budget: int | None = None) -> dict[str, Any]:
    text, images = ASKED[name]
    wish = {} if budget is None else {"mm_processor_kwargs": {"autoprune": {"budget": budget}}}
    asked = [[turn(text + _LONG, *images)]]
    (output,) = llm.chat(asked, _sampling(), use_tqdm=False, **wish)
    return _said(output, steps)


def _sampling() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)


def _said(output: Any, steps: Steps) -> dict[str, Any]:
    said, cached = output.outputs[0], output.num_cached_tokens or 0
    length = len(output.prompt_token_ids) + len(said.token_ids) - 1
    return {
        "prompt": list(output.prompt_token_ids),
        "ids": list(said.token_ids),
        "logprob": float(said.cumulative_logprob),
        "cached": cached,
        "positions": steps.take(length - cached),
    }


def _heard(llm: Any) -> Steps:
    steps = Steps()
    # Of the first layer: vLLM calls the model around its hooks.
    first = model_of(llm).get_language_model().model.layers[0]
    first.register_forward_pre_hook(steps.note, with_kwargs=True)
    return steps


def _run(name: str) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        return _report(build(name, Path(folder)))


def _report(folder: Path) -> Report:
    report: dict[str, Any] = {}
    llm = _engine(folder, None)
    steps = _heard(llm)
    report["stock"] = {name: _asked(llm, steps, name) for name in ASKED}
    video = {"stock": _video(llm, steps)}
    released(llm)

    llm = _engine(folder, SETTINGS)
    steps, seen = _heard(llm), watch()
    report["predicted"] = _predicted(llm)
    report["whole"] = {name: _asked(llm, steps, name) for name in ASKED}
    report["pruned"], report["again"], report["kept"] = {}, {}, {}
    before = _runs(llm)
    for name in ASKED:
        seen.places.clear()
        report["pruned"][name] = _asked(llm, steps, name, FEW)
        report["kept"][name] = list(seen.places)
        report["again"][name] = _asked(llm, steps, name, FEW)
    report["vision_runs"] = _runs(llm) - before
    forget(llm)
    report["alone"] = {name: _asked(llm, steps, name, FEW) for name in ["other question", "wide"]}
    counts = model_of(llm).autoprune_meter.counts()
    report["fallbacks"] = sum(count for kind, count in counts.items() if kind != "none")
    report["errors"] = model_of(llm).autoprune_meter.raised
    released(llm)

    llm = _engine(folder, {**SETTINGS, "budget": FEW}, max_num_batched_tokens=8, max_num_seqs=2)
    steps = _heard(llm)
    report["chunked"] = {name: _asked(llm, steps, name) for name in ASKED}
    video["pruned"] = _video(llm, steps)
    report["video"] = video
    released(llm)
    return report


def _predicted(llm: Any) -> dict[str, list[int]]:
    """N of every image by its size alone, before any model runs."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.parse import ImageSize

    processor = MULTIMODAL_REGISTRY.create_processor(llm.llm_engine.model_config)
    said = processor._placeholders
    return {
        name: [said.extent(processor.info, ImageSize(*i.size), {}).tokens for i in images]
        for name, (_, images) in ASKED.items()
    }


def _video(llm: Any, steps: Steps) -> dict[str, Any] | None:
    """An answer about four frames; None where the model takes no videos."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    processor = MULTIMODAL_REGISTRY.create_processor(llm.llm_engine.model_config)
    if "video" not in processor.info.get_supported_mm_limits():
        return None
    frames = numpy.stack([numpy.asarray(picture(56, 84, seed)) for seed in range(4)])
    told = {
        "fps": 2.0,
        "duration": 2.0,
        "total_num_frames": 4,
        "frames_indices": [0, 1, 2, 3],
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
    shown = type(model_of(llm)).get_placeholder_str("video", 0)
    prompt = {
        "prompt": f"user {shown} what is on the left you",
        "multi_modal_data": {"video": (frames, told)},
    }
    return _said(llm.generate([prompt], _sampling(), use_tqdm=False)[0], steps)


def _runs(llm: Any) -> int:
    vision = model_of(llm).autoprune
    assert vision is not None
    return vision.runs


for _name in BUILDERS:
    _scenario: Callable[[], Report] = partial(_run, _name)
    SCENARIOS[f"backbone_{_name}"] = _scenario
