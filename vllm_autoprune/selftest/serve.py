"""Serve one tiny model in this process under every setting of the self-test.

``python -m vllm_autoprune.selftest.serve NAME`` prints the report of a backbone. Each scenario adds
its completions to ``completions``, under the names that :class:`Report` lists, and returns what
else it observed.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import torch

from vllm_autoprune.backbones import read_config
from vllm_autoprune.errors import RequestError
from vllm_autoprune.selftest.backbones import TINY_MODELS, build
from vllm_autoprune.selftest.engine import STEPS_BETWEEN_PREEMPTIONS, TinyEngine
from vllm_autoprune.selftest.merger import measure_merger_error
from vllm_autoprune.selftest.questions import (
    COLOUR,
    COUNT,
    LARGE,
    LARGE_BUDGET,
    PAGE_QUESTION,
    PLACE,
    QUESTIONS,
    VIDEO_BUDGET,
    make_settings,
)
from vllm_autoprune.selftest.run import (
    RECALL,
    REPORT_PREFIX,
    SMALL_BUDGET,
    SPLIT_BUDGET,
    SPLIT_QUESTION,
    Completion,
    Completions,
    Profile,
    PrunedImages,
    Report,
    Rows,
    SplitImage,
)
from vllm_autoprune.serving.models import require_served

_Settings = defaultdict[str, Completions]

# Scheduler steps of 8 tokens, so that prompts are prefilled in chunks.
_CHUNKED = {"max_num_batched_tokens": 8, "max_num_seqs": 2}


def serve(folder: Path) -> Report:
    """Serve the model in ``folder`` under all settings, and report the results."""
    completions: _Settings = defaultdict(dict)
    profile = _serve_stock(folder, completions)
    with TinyEngine(folder, make_settings(LARGE_BUDGET)) as engine:
        placed = engine.model.autoprune_axes > 0
        predicted = _predict_tokens(engine)
        completions["whole"] = engine.ask_each(QUESTIONS)
        completions["others"] = engine.ask_video("video")
        images = _prune_images(engine, completions)
        engine.empty_caches()
        sharing = {name: QUESTIONS[name] for name in ("other question", "wide")}
        completions["alone"] = engine.ask_each(sharing, SMALL_BUDGET)
        cells = _leave_out_cells(engine, completions["cells"])
        video = _prune_video(engine, completions["videos"])
        reporter = engine.model.autoprune_reporter
        counts = reporter.counts().items()
        fallbacks = sum(count for (kind, _), count in counts if kind != "none")
        errors = dict(reporter.errors)
    _serve_in_small_steps(folder, completions)
    split = _serve_split(folder, completions["split"], *predicted[SPLIT_QUESTION])
    return Report(
        completions=completions,
        predicted=predicted,
        cells=cells,
        video=video,
        fallbacks=fallbacks,
        errors=errors,
        placed=placed,
        **dict(profile),
        **dict(images),
        **dict(split),
    )


def _serve_stock(folder: Path, completions: _Settings) -> Profile:
    """Ask all questions of stock vLLM, without a state; returns the profile of its engine."""
    with TinyEngine(folder, None) as engine:
        caches = engine.runner.kv_cache_config.kv_cache_groups
        profile = Profile(
            runner="v2" if engine.config.use_v2_model_runner else "v1",
            hybrid=engine.config.model_config.is_hybrid,
            mixed=len(caches) > 1,
        )
        completions["stock"] = engine.ask_each(QUESTIONS)
        completions["stock others"] = engine.ask_video("video")
        completions["cells"]["stock"] = engine.ask(PAGE_QUESTION)
    if completions["stock others"]:
        # Chunked prefill rounds differently, so chunked results get a chunked reference.
        with TinyEngine(folder, None, **_CHUNKED) as engine:
            completions["stock others"] |= engine.ask_video("chunked video")
    return profile


# ---- one engine with a state, one request at a time ----


def _predict_tokens(engine: TinyEngine) -> dict[str, list[int]]:
    """N of every image of each question, computed from the sizes of the images alone."""
    from vllm.multimodal.parse import ImageSize

    placeholders = engine.processor._placeholders
    info = engine.processor.info
    return {
        name: [
            placeholders.count(info, ImageSize(*image.size), {}).tokens
            for image in images
        ]
        for name, (_, images) in QUESTIONS.items()
    }


def _prune_images(engine: TinyEngine, completions: _Settings) -> PrunedImages:
    """Ask each question twice with a small K."""
    rows: dict[str, Rows] = {}
    texts: dict[str, Rows] = {}
    runs = engine.runs
    for name, question in QUESTIONS.items():
        with engine.recording() as recorded:
            completions["pruned"][name] = engine.ask(question, SMALL_BUDGET)
        rows[name] = recorded.rows
        texts[name] = recorded.texts
        completions["again"][name] = engine.ask(question, SMALL_BUDGET)
    images = {id(image) for _, images in QUESTIONS.values() for image in images}
    vision_runs = engine.runs - runs - len(images)
    return PrunedImages(kept=rows, texts=texts, vision_runs=vision_runs)


def _leave_out_cells(engine: TinyEngine, completions: Completions) -> list[int] | None:
    """Ask about a page without its blank cells.

    Returns the cells that remain, or None if the model refuses to drop cells.
    """
    try:
        with engine.recording() as recorded:
            completions["left"] = engine.ask(PAGE_QUESTION, cells="flat")
    except RequestError:  # the tower encodes whole images
        return None
    completions["few"] = engine.ask(PAGE_QUESTION, SMALL_BUDGET, cells="flat")
    engine.empty_caches()
    completions["alone few"] = engine.ask(PAGE_QUESTION, SMALL_BUDGET, cells="flat")
    grid = recorded.features[-1].regions[0].grid
    cells = grid.at_encoded(torch.arange(grid.height * grid.width))
    return list(map(int, cells))


def _prune_video(engine: TinyEngine, completions: Completions) -> Rows:
    """Keep a few tokens of a video; returns their rows, empty if videos are served whole."""
    with suppress(RequestError), engine.recording() as recorded:
        completions |= engine.ask_video("few", video_budget=VIDEO_BUDGET)
        engine.empty_caches()
        completions |= engine.ask_video("alone few", video_budget=VIDEO_BUDGET)
    return recorded.rows


# ---- chunked and preempted prefill ----


def _serve_in_small_steps(folder: Path, completions: _Settings) -> None:
    """Repeat the earlier questions with chunked prefill, and two of them with preemption."""
    cells = completions["cells"]
    with TinyEngine(folder, make_settings(SMALL_BUDGET), **_CHUNKED) as engine:
        completions["chunked"] = chunked = engine.ask_each(QUESTIONS)
        completions["others"] |= engine.ask_video("chunked video")
        if completions["videos"]:
            fields = {"video_budget": VIDEO_BUDGET}
            completions["videos"] |= engine.ask_video("chunked few", **fields)
        if "left" in cells:
            cells["chunked few"] = engine.ask(PAGE_QUESTION, cells="flat")
            cells["chunked left"] = engine.ask(
                PAGE_QUESTION, LARGE_BUDGET, cells="flat"
            )
        engine.llm.reset_prefix_cache()
        longest = max(len(completion.prompt) for completion in chunked.values())
        interval = longest // _CHUNKED["max_num_batched_tokens"] + 3
        with engine.preempting(max(STEPS_BETWEEN_PREEMPTIONS, interval)):
            completions["preempted"] = engine.ask_each(
                {name: QUESTIONS[name] for name in ("tall", "two")}, preempted=True
            )


# ---- a state with a core: one image, three questions, and a conversation ----


def _converse(engine: TinyEngine, recalls: bool, preempted: bool = False) -> Completion:
    """Completion of the third turn; with ``recalls``, later turns recall tokens of the image."""
    fields = {"recall": RECALL} if recalls else {}
    question = QUESTIONS[SPLIT_QUESTION]
    return engine.ask(question, None, preempted, (PLACE, COUNT), **fields)


def _serve_split(folder: Path, completions: Completions, size: int) -> SplitImage:
    """Ask about an image of ``size`` tokens that is split into a core and a delta.

    Questions are asked with shared and with empty caches, chunked and preempted. The state ranks
    tokens before the patch merger if the model has one.
    """
    backbone = require_served(read_config(str(folder)))
    merger = TINY_MODELS.get(backbone.name, {}).get("merger")
    ranks = "merger_input" not in backbone.missing
    ranking = {"rank_at": "merger_in"} if ranks else {}
    budget = min(SPLIT_BUDGET, size - 1)
    settings = make_settings(budget, core={"share": 0.7}, **ranking)
    colour, place, count = ((text, [LARGE]) for text in (COLOUR, PLACE, COUNT))
    with TinyEngine(folder, settings) as engine:
        splittable = not engine.processor._placeholders.unsplittable
        with engine.recording() as recorded:
            completions["first"] = engine.ask(colour)
        merger_error: float | None = None
        if merger is not None:
            features = recorded.features[0]
            merger_error = measure_merger_error(folder, LARGE, features, merger)
        with engine.recording() as recalled:
            completions["third"] = _converse(engine, splittable)
        completions["second"] = engine.ask(place)
        completions["further"] = engine.ask(count)
        engine.empty_caches()
        completions["alone second"] = engine.ask(place)
        completions["again first"] = engine.ask(colour)
        engine.empty_caches()
        completions["alone third"] = _converse(engine, splittable)
        recall_refused = False
        if not splittable:
            try:
                _converse(engine, recalls=True)
            except RequestError:
                recall_refused = True
    steps = {**_CHUNKED, "max_num_batched_tokens": 16}
    with TinyEngine(folder, settings, **steps) as engine:
        completions["chunked first"] = engine.ask(colour)
        completions["chunked second"] = engine.ask(place)
        engine.llm.reset_prefix_cache()
        completions["chunked third"] = _converse(engine, splittable)
        engine.llm.reset_prefix_cache()
        with engine.preempting():
            completions["preempted second"] = engine.ask(place, preempted=True)
            completions["preempted third"] = _converse(engine, splittable, True)
    return SplitImage(
        split_kept=recorded.rows,
        recalled=recalled.rows,
        splittable=splittable,
        recall_refused=recall_refused,
        merger_error=merger_error,
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        report = serve(build(sys.argv[1], Path(folder)))
    print(REPORT_PREFIX + report.model_dump_json())
