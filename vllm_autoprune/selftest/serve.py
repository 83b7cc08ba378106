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
from vllm_autoprune.selftest.run import Completion, Report
from vllm_autoprune.selftest.tiny_engine import (
    FURTHER,
    QUESTIONS,
    QUESTIONS_WITH_BUDGETS,
    SECOND,
    STEPS_BETWEEN_PREEMPTIONS,
    TinyEngine,
)
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.worker.features import ImageFeatures, Signal
from vllm_autoprune.tpdsl.loading import load_state

_MERGER_INPUT: tuple[Signal, Signal] = ("encoder", "merger_norms")


@torch.no_grad()
def _measure_merger_error(folder: Path, image: Image.Image, features: ImageFeatures) -> float:
    """Largest error of a token's row or norms, relative to how much tokens differ.

    Of the features that an engine made of the image, against transformers in float32.
    """
    ranked = [[region.signals[name] for region in features.regions] for name in _MERGER_INPUT]
    errors = []
    for parts, expected in zip(ranked, _read_merger_input(folder, image), strict=True):
        rows = torch.cat(parts)
        deviation = (expected - expected.mean(dim=0)).pow(2).mean(dim=0).sum().sqrt()
        errors.append((rows - expected).norm(dim=1).max() / deviation)
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
    scoring = "merger"
    if hasattr(visual, "deepstack_merger_list"):
        scoring = "deepstack"
        record(scoring, visual.deepstack_merger_list[0])
    visual(inputs["pixel_values"], grid_thw=grid)
    width = entering["merger"].shape[-1]
    rows, scored = (entering[name].reshape(-1, 4, width) for name in ("merger", scoring))
    if window := getattr(visual.config, "window_size", 0):  # Qwen2.5-VL works in window order
        _, height, width = (grid[0] // visual.config.spatial_merge_size).tolist()
        side = window // (visual.config.spatial_merge_size * visual.config.patch_size)
        places = torch.arange(height * width).unflatten(0, (height, width))
        rows_of_windows = (strip.split(side, dim=1) for strip in places.split(side))
        order = torch.cat([w.flatten() for strip in rows_of_windows for w in strip]).argsort()
        rows, scored = rows[order], scored[order]
    sizes = torch.stack([scored.abs().sum(dim=2), scored.pow(2).sum(dim=2).sqrt()], dim=2)
    return rows.mean(dim=1), sizes.mean(dim=1)


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
    made: dict[str, dict[str, Completion]] = {}
    engine = TinyEngine(folder, None)
    config = engine.llm.llm_engine.vllm_config
    results["hybrid"] = config.model_config.is_hybrid
    results["runner"] = "v2" if config.use_v2_model_runner else "v1"
    made["stock"] = {name: engine.ask(name) for name in QUESTIONS}
    made["stock others"] = engine.ask_unpruned()
    engine.stop()

    engine = TinyEngine(folder, _settings(LARGE_BUDGET))
    model = engine.model
    results["predicted"] = engine.predict_tokens()
    made["whole"] = {name: engine.ask(name) for name in QUESTIONS}
    made["pruned"], made["again"], results["kept"] = {}, {}, {}
    runs = model.autoprune.runs
    images = {id(image) for _, pictures in QUESTIONS.values() for image in pictures}
    for name in QUESTIONS:
        with engine.observer.recording_rows() as rows:
            made["pruned"][name] = engine.ask(name, SMALL_BUDGET)
        results["kept"][name] = rows
        made["again"][name] = engine.ask(name, SMALL_BUDGET)
    results["vision_runs"] = model.autoprune.runs - runs - len(images)
    engine.empty_caches()
    made["alone"] = {name: engine.ask(name, SMALL_BUDGET) for name in ("other question", "wide")}
    for setting, uuid in (("unnamed", None), ("renamed", "one name for all")):
        engine.empty_caches()
        made[setting] = {
            name: engine.complete(*request, uuid=uuid)
            for name, request in QUESTIONS_WITH_BUDGETS.items()
        }
    meter = model.autoprune_reporter.meter
    results["fallbacks"] = sum(n for kind, n in meter.counts().items() if kind != "none")
    results["errors"] = dict(meter.errors)
    engine.stop()

    settings = _settings(SMALL_BUDGET)
    engine = TinyEngine(folder, settings, max_num_batched_tokens=8, max_num_seqs=2)
    made["chunked"] = {name: engine.ask(name) for name in QUESTIONS}
    made["others"] = engine.ask_unpruned()
    engine.llm.reset_prefix_cache()
    longest = max(len(completion.prompt) for completion in made["chunked"].values())
    with engine.preempting(max(STEPS_BETWEEN_PREEMPTIONS, longest // 8 + 3)):
        made["preempted"] = {name: engine.ask(name, preempted=True) for name in ("high", "two")}
    merger = not BACKBONES[config.model_config.architecture].input_problems(
        config.model_config.hf_config, ["merger_input"]
    )
    engine.stop()

    # A state with a core, which ranks tokens before the patch merger where the model has one: one
    # image, three questions, and a conversation.
    (size,) = results["predicted"][SPLIT_QUESTION]
    place = {"rank_at": "merger_in"} if merger else {}
    settings = _settings(min(SPLIT_BUDGET, size - 1), core={"share": 0.7}, **place)
    engine = TinyEngine(folder, settings)
    results["splittable"] = engine.splittable
    made["split"] = split = {}
    with engine.observer.recording_rows() as rows:
        split["first"] = engine.ask(SPLIT_QUESTION)
    results["split_kept"] = rows
    _, (image,) = QUESTIONS[SPLIT_QUESTION]
    features = engine.observer.features
    results["merger_error"] = _measure_merger_error(folder, image, features[0]) if merger else None
    with engine.observer.recording_rows() as rows:
        split["third"] = engine.converse()
    results["recalled"] = rows
    split["second"] = engine.complete(*SECOND, None)
    split["further"] = engine.complete(*FURTHER, None)
    engine.empty_caches()
    split["alone second"] = engine.complete(*SECOND, None)
    split["again first"] = engine.ask(SPLIT_QUESTION)
    engine.empty_caches()
    split["alone third"] = engine.converse()
    results["recall_refused"] = not engine.splittable and engine.refuses_recall()
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
    return Report(completions=made, **results)
