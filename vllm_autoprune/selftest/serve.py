"""Serve one tiny model in this process under every setting of the self-test."""

from __future__ import annotations

import gc
import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
from PIL import Image

from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.selftest.checks import SMALL_BUDGET
from vllm_autoprune.selftest.comparisons import BLOCK
from vllm_autoprune.selftest.engine_observer import EngineObserver
from vllm_autoprune.selftest.merger_reference import has_merger, measure_merger_error
from vllm_autoprune.selftest.part_checks import RECALL, SPLIT_BUDGET, SPLIT_QUESTION
from vllm_autoprune.selftest.questions import (
    PADDING,
    QUESTIONS,
    QUESTIONS_WITH_BUDGETS,
    SECOND,
    picture,
)
from vllm_autoprune.selftest.report import Completion, Report
from vllm_autoprune.tpdsl.states.load import load_state

Engine = Any
"""``vllm.LLM``."""

SETTINGS = {"state": "autoprune", "budget": 4096, "requests": "budget"}
"""K above N of every image here; requests ask for less."""


def serve(name: str) -> Report:
    """The report of the tiny model of one backbone."""
    with tempfile.TemporaryDirectory() as folder:
        return _serve_settings(build(name, Path(folder)))


def _serve_settings(folder: Path) -> Report:
    results: dict[str, Any] = {}
    llm, observer = _start_engine(folder, None)
    results["runner"] = "v2" if llm.llm_engine.vllm_config.use_v2_model_runner else "v1"
    results["stock"] = {name: _ask(llm, observer, name) for name in QUESTIONS}
    results["video_stock"] = _ask_about_video(llm, observer)
    _stop_engine(llm)

    llm, observer = _start_engine(folder, SETTINGS)
    model = _model(llm)
    results["predicted"] = _predict_tokens(llm)
    results["whole"] = {name: _ask(llm, observer, name) for name in QUESTIONS}
    results["pruned"], results["again"], results["kept"] = {}, {}, {}
    before = model.autoprune.runs
    images = {id(image) for _, pictures in QUESTIONS.values() for image in pictures}
    for name in QUESTIONS:
        with observer.recording_rows():
            results["pruned"][name] = _ask(llm, observer, name, SMALL_BUDGET)
        results["kept"][name] = list(observer.kept_rows)
        observer.kept_rows.clear()
        results["again"][name] = _ask(llm, observer, name, SMALL_BUDGET)
    results["vision_runs"] = model.autoprune.runs - before - len(images)
    _empty_caches(llm)
    results["alone"] = {
        name: _ask(llm, observer, name, SMALL_BUDGET) for name in ("other question", "wide")
    }
    for way, uuid in (("unnamed", None), ("renamed", "one name for all")):
        _empty_caches(llm)
        results[way] = {
            name: _complete(llm, observer, *request, uuid=uuid)
            for name, request in QUESTIONS_WITH_BUDGETS.items()
        }
    meter = model.autoprune_reporter.meter
    counts = meter.counts()
    results["fallbacks"] = sum(count for kind, count in counts.items() if kind != "none")
    results["errors"] = dict(meter.errors)
    _stop_engine(llm)

    settings = {**SETTINGS, "budget": SMALL_BUDGET}
    llm, observer = _start_engine(folder, settings, max_num_batched_tokens=8, max_num_seqs=2)
    results["chunked"] = {name: _ask(llm, observer, name) for name in QUESTIONS}
    results["video_pruned"] = _ask_about_video(llm, observer)
    llm.reset_prefix_cache()
    with _preempting(llm):
        results["preempted"] = {
            name: _ask(llm, observer, name, preempted=True) for name in ("high", "two")
        }
    merger = has_merger(llm)
    _stop_engine(llm)
    (size,) = results["predicted"][SPLIT_QUESTION]
    return Report(**results, **_serve_split(folder, min(SPLIT_BUDGET, size - 1), merger))


def _serve_split(folder: Path, budget: int, merger: bool) -> dict[str, Any]:
    """Completions under a state with a core: one image, two questions, then a conversation.

    The state ranks tokens before the patch merger where the model has one.
    """
    state = {**load_state("autoprune").model_dump(mode="json"), "core": {"share": 0.7}}
    if merger:
        state["rank_at"] = "merger_in"
    settings = {"state": state, "budget": budget, "requests": "budget"}
    llm, observer = _start_engine(folder, settings)
    placeholders = _processor(llm)._placeholders
    split = {}
    with observer.recording_rows():
        split["first"] = _ask(llm, observer, SPLIT_QUESTION)
    kept = list(observer.kept_rows)
    error = None
    if merger:
        _, (image,) = QUESTIONS[SPLIT_QUESTION]
        error = measure_merger_error(folder, image, observer.features[0])
    observer.kept_rows.clear()
    with observer.recording_rows():
        split["third"] = _converse(llm, observer)
    recalled = list(observer.kept_rows)
    split["second"] = _complete(llm, observer, *SECOND, None)
    _empty_caches(llm)
    split["alone second"] = _complete(llm, observer, *SECOND, None)
    split["again first"] = _ask(llm, observer, SPLIT_QUESTION)
    _empty_caches(llm)
    split["alone third"] = _converse(llm, observer)
    _stop_engine(llm)

    llm, observer = _start_engine(folder, settings, max_num_batched_tokens=16, max_num_seqs=2)
    split["chunked first"] = _ask(llm, observer, SPLIT_QUESTION)
    split["chunked second"] = _complete(llm, observer, *SECOND, None)
    llm.reset_prefix_cache()
    split["chunked third"] = _converse(llm, observer)
    llm.reset_prefix_cache()
    with _preempting(llm):
        split["preempted second"] = _complete(llm, observer, *SECOND, None, preempted=True)
        split["preempted third"] = _converse(llm, observer, preempted=True)
    _stop_engine(llm)
    return {
        "split": split,
        "split_kept": kept,
        "recalled": recalled,
        "splittable": not placeholders.unsplittable,
        "merger_error": error,
    }


def _start_engine(
    folder: Path, settings: Mapping[str, object] | None, **options: object
) -> tuple[Engine, EngineObserver]:
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
    observer = EngineObserver()
    observer.record_positions(_model(llm).get_language_model().model.layers[0])
    return llm, observer


@contextmanager
def _preempting(llm: Engine) -> Iterator[None]:
    """Preempt running requests regularly, during prefill and during decoding."""
    engine = llm.llm_engine
    step, steps = engine.step, itertools.count(1)

    def step_with_preemption() -> Any:
        if next(steps) % _STEPS_BETWEEN_PREEMPTIONS == 0:
            engine.reset_prefix_cache(reset_running_requests=True)
        return step()

    engine.step = step_with_preemption
    try:
        yield
    finally:
        engine.step = step


_STEPS_BETWEEN_PREEMPTIONS = 11
"""A prompt takes 6 to 9 steps and decoding 3 more, so that the first request is preempted while it
is decoded and the second while it is prefilled."""


def _empty_caches(llm: Engine) -> None:
    llm.reset_prefix_cache()
    llm.llm_engine.reset_mm_cache()
    llm.llm_engine.reset_encoder_cache()


def _stop_engine(llm: Engine) -> None:
    llm.llm_engine.engine_core.shutdown()
    # vLLM collects garbage several times a start, and each time walks all that was imported.
    gc.freeze()


def _model(llm: Engine) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def _processor(llm: Engine) -> Any:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    return MULTIMODAL_REGISTRY.create_processor(llm.llm_engine.model_config)


def _predict_tokens(llm: Engine) -> dict[str, list[int]]:
    """N of every image, computed from its size before any model runs."""
    from vllm.multimodal.parse import ImageSize

    processor = _processor(llm)
    count = processor._placeholders.count
    return {
        name: [count(processor.info, ImageSize(*image.size), {}).tokens for image in images]
        for name, (_, images) in QUESTIONS.items()
    }


def _ask(
    llm: Engine,
    observer: EngineObserver,
    name: str,
    budget: int | None = None,
    preempted: bool = False,
) -> Completion:
    return _complete(llm, observer, *QUESTIONS[name], budget, preempted)


def _complete(
    llm: Engine,
    observer: EngineObserver,
    text: str,
    images: Sequence[Image.Image],
    budget: int | Sequence[int] | None,
    preempted: bool = False,
    uuid: str | None = None,
) -> Completion:
    named = {} if uuid is None else {"uuid": uuid}
    parts: list[dict[str, object]] = [
        {"type": "image_pil", "image_pil": image, **named} for image in images
    ]
    content = [*parts, {"type": "text", "text": text + PADDING}]
    messages: list[dict[str, object]] = [{"role": "user", "content": content}]
    requested = budget if budget is None or isinstance(budget, int) else list(budget)
    entry = {} if budget is None else {"budget": requested}
    return _chat(llm, observer, messages, entry, preempted)


def _converse(llm: Engine, observer: EngineObserver, preempted: bool = False) -> Completion:
    """The completion of a third turn, where the second and the third recall tokens."""
    text, (image,) = QUESTIONS[SPLIT_QUESTION]
    first = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": text + PADDING}]
    messages: list[dict[str, object]] = [{"role": "user", "content": first}]
    for later in ("which dog is on the left", "how many are there"):
        messages += [{"role": "assistant", "content": "blue"}, {"role": "user", "content": later}]
    return _chat(llm, observer, messages, {"recall": RECALL}, preempted)


def _chat(
    llm: Engine,
    observer: EngineObserver,
    messages: list[dict[str, object]],
    entry: Mapping[str, object],
    preempted: bool,
) -> Completion:
    options = {"mm_processor_kwargs": {"autoprune": dict(entry)}} if entry else {}
    (output,) = llm.chat([messages], _sampling(), use_tqdm=False, **options)
    return _completion(output, observer, preempted)


def _ask_about_video(llm: Engine, observer: EngineObserver) -> Completion | None:
    """The completion about a video of four frames; None if the model takes no videos."""
    if "video" not in _processor(llm).info.get_supported_mm_limits():
        return None
    frames = numpy.stack([numpy.asarray(picture(56, 84, seed)) for seed in range(4)])
    metadata = {
        "fps": 2.0,
        "duration": 2.0,
        "total_num_frames": 4,
        "frames_indices": [0, 1, 2, 3],
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
    placeholder = type(_model(llm)).get_placeholder_str("video", 0)
    prompt = {
        "prompt": f"user {placeholder} what is on the left you",
        "multi_modal_data": {"video": (frames, metadata)},
    }
    return _completion(llm.generate([prompt], _sampling(), use_tqdm=False)[0], observer)


def _sampling() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)


def _completion(output: Any, observer: EngineObserver, preempted: bool = False) -> Completion:
    generated = output.outputs[0]
    cached = 0 if preempted else output.num_cached_tokens or 0
    prompt, ids = list(output.prompt_token_ids), list(generated.token_ids)
    return Completion(
        prompt=prompt,
        ids=ids,
        logprob=float(generated.cumulative_logprob),
        cached=cached,
        positions=observer.take_positions(len(prompt) + len(ids) - 1 - cached, last=preempted),
    )
