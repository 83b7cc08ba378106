"""Serves one tiny model in this process: stock, with every token kept, pruned, in small steps.

Knows nothing about what should be equal.
"""

from __future__ import annotations

import gc
import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
from PIL import Image

from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.selftest.checks import BLOCK, FEW
from vllm_autoprune.selftest.report import Report, Said
from vllm_autoprune.selftest.witness import Witness

Engine = Any
"""``vllm.LLM``."""

SETTINGS = {"state": "autoprune", "budget": 4096, "requests": "budget"}
"""K above N of every image here; requests ask for less."""


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Coloured blocks."""
    source = numpy.random.default_rng(seed)
    blocks = source.integers(0, 255, (height // 8, width // 8, 3), dtype=numpy.uint8)
    return Image.fromarray(blocks).resize((width, height))


_WIDE, _HIGH = picture(200, 112, 1), picture(96, 208, 2)
ASKED: Mapping[str, tuple[str, tuple[Image.Image, ...]]] = {
    "square": ("what colour is the cat", (picture(112, 112, 0),)),
    "wide": ("what colour is the cat", (_WIDE,)),
    "high": ("what colour is the cat", (_HIGH,)),
    "large": ("what colour is the cat", (picture(330, 300, 4),)),
    "two": ("how many are there", (_HIGH, picture(120, 96, 3))),
    "other question": ("which dog is on the left", (_WIDE,)),
}
RENAMED: Mapping[str, tuple[str, tuple[Image.Image, ...], Sequence[int]]] = {
    "two at once": (*ASKED["two"], (FEW, FEW)),
    "one pruned, one whole": (ASKED["two"][0], (picture(96, 96, 5), _WIDE), (FEW, 4096)),
    "first": (*ASKED["high"], (FEW,)),
    "second": (*ASKED["wide"], (FEW,)),
}
"""Asked under one `uuid` for all images: in one request and in two, with a budget an image."""
_LONG = " and the sky is blue on the right" * 6
"""So that the image and some of the text fill a block of the prefix cache."""


def serve(name: str) -> Report:
    """What the tiny model of one backbone does."""
    with tempfile.TemporaryDirectory() as folder:
        return _served(build(name, Path(folder)))


def _served(folder: Path) -> Report:
    found: dict[str, Any] = {}
    llm, witness = _engine(folder, None)
    found["runner"] = "v2" if llm.llm_engine.vllm_config.use_v2_model_runner else "v1"
    found["stock"] = {name: _ask(llm, witness, name) for name in ASKED}
    found["video_stock"] = _show_video(llm, witness)
    _end(llm)

    llm, witness = _engine(folder, SETTINGS)
    model = _model(llm)
    found["predicted"] = _predicted(llm)
    found["whole"] = {name: _ask(llm, witness, name) for name in ASKED}
    found["pruned"], found["again"], found["kept"] = {}, {}, {}
    before = model.autoprune.runs
    images = {id(image) for _, shown in ASKED.values() for image in shown}
    for name in ASKED:
        with witness.of_rows():
            found["pruned"][name] = _ask(llm, witness, name, FEW)
        found["kept"][name] = list(witness.places)
        witness.places.clear()
        found["again"][name] = _ask(llm, witness, name, FEW)
    found["vision_runs"] = model.autoprune.runs - before - len(images)
    _empty_caches(llm)
    found["alone"] = {name: _ask(llm, witness, name, FEW) for name in ("other question", "wide")}
    for way, uuid in (("unnamed", None), ("renamed", "one name for all")):
        _empty_caches(llm)
        found[way] = {
            name: _ask_about(llm, witness, *asked, uuid=uuid) for name, asked in RENAMED.items()
        }
    counts = model.autoprune_meter.counts()
    found["fallbacks"] = sum(count for kind, count in counts.items() if kind != "none")
    found["errors"] = dict(model.autoprune_meter.raised)
    _end(llm)

    settings = {**SETTINGS, "budget": FEW}
    llm, witness = _engine(folder, settings, max_num_batched_tokens=8, max_num_seqs=2)
    found["chunked"] = {name: _ask(llm, witness, name) for name in ASKED}
    found["video_pruned"] = _show_video(llm, witness)
    llm.reset_prefix_cache()
    with _preempting(llm):
        found["preempted"] = {
            name: _ask(llm, witness, name, began_anew=True) for name in ("high", "two")
        }
    _end(llm)
    return Report(**found)


def _engine(
    folder: Path, settings: Mapping[str, object] | None, **options: object
) -> tuple[Engine, Witness]:
    from vllm import LLM

    more = {} if settings is None else {"additional_config": {"autoprune": dict(settings)}}
    llm = LLM(
        model=str(folder),
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=1024,
        block_size=BLOCK,
        num_gpu_blocks_override=128,
        limit_mm_per_prompt={"image": 4},
        **more,
        **options,
    )
    witness = Witness()
    witness.attend(_model(llm).get_language_model().model.layers[0])
    return llm, witness


@contextmanager
def _preempting(llm: Engine) -> Iterator[None]:
    """Push running requests back to the waiting queue: while prefilling, and while decoding."""
    engine = llm.llm_engine
    step, done = engine.step, itertools.count(1)

    def interrupted() -> Any:
        if next(done) % _SOMETIMES == 0:
            engine.reset_prefix_cache(reset_running_requests=True)
        return step()

    with patch.object(engine, "step", interrupted):
        yield


_SOMETIMES = 11
"""Steps from one preemption to the next. A prompt here takes 8 or 9 and decoding 3 more, so the
first request is pushed back while it is decoded, the second while it is prefilled."""


def _empty_caches(llm: Engine) -> None:
    llm.reset_prefix_cache()
    llm.llm_engine.reset_mm_cache()
    llm.llm_engine.reset_encoder_cache()


def _end(llm: Engine) -> None:
    llm.llm_engine.engine_core.shutdown()
    # vLLM collects garbage several times a start, and each time walks all that was imported.
    gc.freeze()


def _model(llm: Engine) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def _processor(llm: Engine) -> Any:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    return MULTIMODAL_REGISTRY.create_processor(llm.llm_engine.model_config)


def _predicted(llm: Engine) -> dict[str, list[int]]:
    """N of every image by its size alone, before any model runs."""
    from vllm.multimodal.parse import ImageSize

    processor = _processor(llm)
    extent = processor._placeholders.extent
    return {
        name: [extent(processor.info, ImageSize(*image.size), {}).tokens for image in images]
        for name, (_, images) in ASKED.items()
    }


def _ask(
    llm: Engine,
    witness: Witness,
    name: str,
    budget: int | None = None,
    began_anew: bool = False,
) -> Said:
    return _ask_about(llm, witness, *ASKED[name], budget, began_anew)


def _ask_about(
    llm: Engine,
    witness: Witness,
    text: str,
    images: Sequence[Image.Image],
    budget: int | Sequence[int] | None,
    began_anew: bool = False,
    uuid: str | None = None,
) -> Said:
    named = {} if uuid is None else {"uuid": uuid}
    parts: list[dict[str, object]] = [
        {"type": "image_pil", "image_pil": image, **named} for image in images
    ]
    asked = [[{"role": "user", "content": [*parts, {"type": "text", "text": text + _LONG}]}]]
    asked_for = budget if budget is None or isinstance(budget, int) else list(budget)
    wish = {} if budget is None else {"mm_processor_kwargs": {"autoprune": {"budget": asked_for}}}
    (output,) = llm.chat(asked, _sampling(), use_tqdm=False, **wish)
    return _said(output, witness, began_anew)


def _show_video(llm: Engine, witness: Witness) -> Said | None:
    """An answer about four frames; None where the model takes no videos."""
    if "video" not in _processor(llm).info.get_supported_mm_limits():
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
    shown = type(_model(llm)).get_placeholder_str("video", 0)
    prompt = {
        "prompt": f"user {shown} what is on the left you",
        "multi_modal_data": {"video": (frames, told)},
    }
    return _said(llm.generate([prompt], _sampling(), use_tqdm=False)[0], witness)


def _sampling() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)


def _said(output: Any, witness: Witness, began_anew: bool = False) -> Said:
    said = output.outputs[0]
    cached = 0 if began_anew else output.num_cached_tokens or 0
    prompt, ids = list(output.prompt_token_ids), list(said.token_ids)
    return Said(
        prompt=prompt,
        ids=ids,
        logprob=float(said.cumulative_logprob),
        cached=cached,
        positions=witness.positions(len(prompt) + len(ids) - 1 - cached, last=began_anew),
    )
