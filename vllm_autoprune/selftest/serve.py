"""Serve one tiny model in this process under every setting of the self-test."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.selftest.checks import SMALL_BUDGET
from vllm_autoprune.selftest.merger_reference import has_merger, measure_merger_error
from vllm_autoprune.selftest.part_checks import SPLIT_BUDGET, SPLIT_QUESTION
from vllm_autoprune.selftest.questions import FURTHER, QUESTIONS, QUESTIONS_WITH_BUDGETS, SECOND
from vllm_autoprune.selftest.report import Report
from vllm_autoprune.selftest.tiny_engine import STEPS_BETWEEN_PREEMPTIONS, TinyEngine
from vllm_autoprune.tpdsl.loading import load_state


def _settings(budget: int, **more: object) -> dict[str, Any]:
    """Settings of a server: CDPruner refined by signals that read question and attention.

    Rows stay as they are, because checks find tokens by them. The signals of ``autoprune``, of
    means and norms, are nearly equal for tokens of a random model, where the two model runners
    round in another way.
    """
    state: dict[str, Any] = load_state("autoprune").model_dump(mode="json")
    weights = {
        "instruction_guided_visual_relevance": 0.4,
        "attention_proxy_saliency": 0.2,
        "spatial_centrality_prior": 0.1,
        "redundancy_density_penalty": 0.2,
        "local_contrast_saliency": 0.1,
    }
    state["scoring"] = {
        "signals": [{"atom": atom, "weight": weight} for atom, weight in weights.items()],
        "kernel": {"atom": "pairwise_cosine_kernel"},
        "fusion": {"atom": "weighted_product_fusion"},
    }
    pools = [
        {"atom": "quality_pool_builder"},
        {"atom": "diversity_pool_builder", "pool_ratio": 0.5},
    ]
    selector = {"atom": "reference_residual_exchange_selector"}
    state["constraints"] = {"pool": pools, "selector": selector}
    state = {**state, "reassembly": {"atom": "mean_residual"}, **more}
    return {"state": state, "budget": budget, "requests": "budget"}


LARGE_BUDGET = 4096
"""K above N of every image here; requests ask for less."""


def serve(name: str) -> Report:
    """The report of the tiny model of one backbone."""
    with tempfile.TemporaryDirectory() as folder:
        return _serve_settings(build(name, Path(folder)))


def _serve_settings(folder: Path) -> Report:
    results: dict[str, Any] = {}
    engine = TinyEngine(folder, None)
    results["hybrid"] = engine.llm.llm_engine.model_config.is_hybrid
    results["runner"] = "v2" if engine.llm.llm_engine.vllm_config.use_v2_model_runner else "v1"
    results["stock"] = {name: engine.ask(name) for name in QUESTIONS}
    results["video_stock"] = engine.ask_about_video()
    results["embeddings_stock"] = engine.ask_about_embeddings()
    engine.stop()

    engine = TinyEngine(folder, _settings(LARGE_BUDGET))
    model = engine.model
    results["predicted"] = engine.predict_tokens()
    results["whole"] = {name: engine.ask(name) for name in QUESTIONS}
    results["pruned"], results["again"], results["kept"] = {}, {}, {}
    before = model.autoprune.runs
    images = {id(image) for _, pictures in QUESTIONS.values() for image in pictures}
    for name in QUESTIONS:
        with engine.observer.recording_rows():
            results["pruned"][name] = engine.ask(name, SMALL_BUDGET)
        results["kept"][name] = list(engine.observer.kept_rows)
        engine.observer.kept_rows.clear()
        results["again"][name] = engine.ask(name, SMALL_BUDGET)
    results["vision_runs"] = model.autoprune.runs - before - len(images)
    engine.empty_caches()
    results["alone"] = {name: engine.ask(name, SMALL_BUDGET) for name in ("other question", "wide")}
    for way, uuid in (("unnamed", None), ("renamed", "one name for all")):
        engine.empty_caches()
        results[way] = {
            name: engine.complete(*request, uuid=uuid)
            for name, request in QUESTIONS_WITH_BUDGETS.items()
        }
    meter = model.autoprune_reporter.meter
    counts = meter.counts()
    results["fallbacks"] = sum(count for kind, count in counts.items() if kind != "none")
    results["errors"] = dict(meter.errors)
    engine.stop()

    settings = _settings(SMALL_BUDGET)
    engine = TinyEngine(folder, settings, max_num_batched_tokens=8, max_num_seqs=2)
    results["chunked"] = {name: engine.ask(name) for name in QUESTIONS}
    results["video_pruned"] = engine.ask_about_video()
    results["embeddings_pruned"] = engine.ask_about_embeddings()
    engine.llm.reset_prefix_cache()
    longest = max(len(one.prompt) for one in results["chunked"].values())
    with engine.preempting(max(STEPS_BETWEEN_PREEMPTIONS, longest // 8 + 3)):
        results["preempted"] = {name: engine.ask(name, preempted=True) for name in ("high", "two")}
    merger = has_merger(engine.llm)
    engine.stop()
    (size,) = results["predicted"][SPLIT_QUESTION]
    return Report(**results, **_serve_split(folder, min(SPLIT_BUDGET, size - 1), merger))


def _serve_split(folder: Path, budget: int, merger: bool) -> dict[str, Any]:
    """Completions under a state with a core: one image, two questions, then a conversation.

    The state ranks tokens before the patch merger where the model has one.
    """
    place = {"rank_at": "merger_in"} if merger else {}
    settings = _settings(budget, core={"share": 0.7}, **place)
    engine = TinyEngine(folder, settings)
    splittable = engine.splittable
    split = {}
    with engine.observer.recording_rows():
        split["first"] = engine.ask(SPLIT_QUESTION)
    kept = list(engine.observer.kept_rows)
    error = None
    if merger:
        _, (image,) = QUESTIONS[SPLIT_QUESTION]
        error = measure_merger_error(folder, image, engine.observer.features[0])
    engine.observer.kept_rows.clear()
    with engine.observer.recording_rows():
        split["third"] = engine.converse()
    recalled = list(engine.observer.kept_rows)
    split["second"] = engine.complete(*SECOND, None)
    split["further"] = engine.complete(*FURTHER, None)
    engine.empty_caches()
    split["alone second"] = engine.complete(*SECOND, None)
    split["again first"] = engine.ask(SPLIT_QUESTION)
    engine.empty_caches()
    split["alone third"] = engine.converse()
    refused = not splittable and engine.refuses_recall()
    engine.stop()

    engine = TinyEngine(folder, settings, max_num_batched_tokens=16, max_num_seqs=2)
    split["chunked first"] = engine.ask(SPLIT_QUESTION)
    split["chunked second"] = engine.complete(*SECOND, None)
    engine.llm.reset_prefix_cache()
    split["chunked third"] = engine.converse()
    engine.llm.reset_prefix_cache()
    with engine.preempting():
        split["preempted second"] = engine.complete(*SECOND, None, preempted=True)
        split["preempted third"] = engine.converse(preempted=True)
    engine.stop()
    return {
        "split": split,
        "split_kept": kept,
        "recalled": recalled,
        "recall_refused": refused,
        "splittable": splittable,
        "merger_error": error,
    }
