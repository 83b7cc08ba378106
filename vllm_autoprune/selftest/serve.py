"""Serve one tiny model in this process under every setting of the self-test.

What a state before the patch merger ranks is compared with what enters the merger in transformers.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.selftest.checks import SMALL_BUDGET, SPLIT_BUDGET, SPLIT_QUESTION
from vllm_autoprune.selftest.run import Report
from vllm_autoprune.selftest.tiny_engine import (
    FURTHER,
    QUESTIONS,
    QUESTIONS_WITH_BUDGETS,
    SECOND,
    STEPS_BETWEEN_PREEMPTIONS,
    TinyEngine,
)
from vllm_autoprune.serving.worker.features import ImageFeatures, Signal
from vllm_autoprune.tpdsl.loading import load_state


def has_merger(llm: Any) -> bool:
    """Whether the plugin can rank tokens before a patch merger of the engine's model."""
    from vllm_autoprune.serving.models import BACKBONES

    config = llm.llm_engine.model_config
    backbone = BACKBONES[config.architecture]
    return not backbone.input_problems(config.hf_config, ["merger_input"])


MERGER_INPUT: tuple[Signal, Signal] = ("encoder", "merger_norms")


@torch.no_grad()
def measure_merger_error(folder: Path, image: Image.Image, features: ImageFeatures) -> float:
    """Largest error of a token's row or norms, relative to how much tokens differ.

    Of the features that an engine made of the image, against transformers in float32.
    """
    read = [[region.signals[name] for region in features.regions] for name in MERGER_INPUT]
    errors = []
    for parts, expected in zip(read, _read_merger_input(folder, image), strict=True):
        found = torch.cat(parts)
        deviation = (expected - expected.mean(dim=0)).pow(2).mean(dim=0).sum().sqrt()
        errors.append((found - expected).norm(dim=1).max() / deviation)
    return float(torch.stack(errors).max())


def _read_merger_input(folder: Path, image: Image.Image) -> tuple[Tensor, Tensor]:
    """Rows ``(N, C)`` and norms ``(N, 2)`` of one image, in raster order."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).model
    processor = AutoProcessor.from_pretrained(folder).image_processor
    inputs = processor(images=[image], return_tensors="pt")
    entering: dict[str, Tensor] = {}

    def record(name: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda _, args: entering.update({name: args[0]}))

    if not hasattr(model, "visual"):  # InternVL and Idefics3: shuffled tiles (T, n, patches * C)
        shuffled = (
            model.multi_modal_projector
            if hasattr(model, "multi_modal_projector")
            else model.connector.modality_projection
        )
        record("merger", shuffled)
        model.get_image_features(pixel_values=inputs["pixel_values"])
        tokens = entering["merger"].flatten(0, 1)
        norms = torch.stack([tokens.abs().sum(dim=1), tokens.pow(2).sum(dim=1).sqrt()], dim=1)
        width = model.config.vision_config.hidden_size
        return tokens.unflatten(1, (-1, width)).mean(dim=1), norms

    visual, grid = model.visual, inputs["image_grid_thw"]
    # GLM-4.xV merges by a convolution behind a norm.
    record("merger", visual.post_layernorm if hasattr(visual, "downsample") else visual.merger)
    first = "merger"
    if hasattr(visual, "deepstack_merger_list"):
        first = "deepstack"
        record(first, visual.deepstack_merger_list[0])
    visual(inputs["pixel_values"], grid_thw=grid)
    width = entering["merger"].shape[-1]
    rows, scored = (entering[name].reshape(-1, 4, width) for name in ("merger", first))
    if window := getattr(visual.config, "window_size", 0):  # Qwen2.5-VL works in window order
        _, height, width = (grid[0] // visual.config.spatial_merge_size).tolist()
        side = window // (visual.config.spatial_merge_size * visual.config.patch_size)
        order = _window_order(height, width, side).argsort()
        rows, scored = rows[order], scored[order]
    sizes = torch.stack([scored.abs().sum(dim=2), scored.pow(2).sum(dim=2).sqrt()], dim=2)
    return rows.mean(dim=1), sizes.mean(dim=1)


def _window_order(height: int, width: int, side: int) -> Tensor:
    """Raster places of a grid's tokens, window by window."""
    return torch.tensor(
        [
            row * width + column
            for top in range(0, height, side)
            for left in range(0, width, side)
            for row in range(top, min(top + side, height))
            for column in range(left, min(left + side, width))
        ]
    )


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
        return serve_folder(build(name, Path(folder)))


def serve_folder(folder: Path) -> Report:
    """The report of a model in a folder."""
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
