"""Serve one tiny model in this process under every setting of the self-test.

``python -m vllm_autoprune.selftest.serve NAME`` prints the report of a backbone.
"""

from __future__ import annotations

import gc
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import torch
from PIL import Image
from torch import Tensor, nn

from vllm_autoprune.errors import RequestError
from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.selftest.backbones import ORIGINAL, TINY_MODELS, build
from vllm_autoprune.selftest.run import (
    BLOCK,
    RECALL,
    REPORT_PREFIX,
    SMALL_BUDGET,
    SPLIT_BUDGET,
    SPLIT_QUESTION,
    Completion,
    Report,
)
from vllm_autoprune.serving.models import BACKBONES, pruned_model
from vllm_autoprune.serving.plan import ItemPlan
from vllm_autoprune.serving.worker.batch import SelectionContext, prune_images
from vllm_autoprune.serving.worker.features import ImageFeatures, Signal
from vllm_autoprune.serving.worker.rows import count_channels
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.tokens import Grid

# ---- what is asked ----


def picture(width: int, height: int, seed: int) -> Image.Image:
    """A picture of coloured blocks."""
    source = numpy.random.default_rng(seed)
    blocks = source.integers(0, 255, (height // 8, width // 8, 3), dtype=numpy.uint8)
    return Image.fromarray(blocks).resize((width, height))


_WIDE = picture(200, 112, 1)
_TALL = picture(96, 208, 2)
_LARGE = picture(330, 300, 4)
_COLOUR = "what colour is the cat"
_COUNT = "how many are there"
_PLACE = "which dog is on the left"


def clip(count: int, seed: int = 0) -> tuple[Any, dict[str, object]]:
    """Frames ``(count, 84, 56, 3)`` of a video, and what vLLM says of one that it has sampled."""
    frames = numpy.stack(
        [numpy.asarray(picture(56, 84, seed + at)) for at in range(count)]
    )
    video = {"fps": 2.0, "duration": count / 2, "total_num_frames": count}
    sampled = {"frames_indices": [*range(count)], "do_sample_frames": False}
    return frames, {**video, **sampled, "video_backend": "opencv"}


_Question = tuple[str, Sequence[Image.Image]]
_QUESTIONS: Mapping[str, _Question] = {
    "square": (_COLOUR, [picture(112, 112, 0)]),
    "wide": (_COLOUR, [_WIDE]),
    "high": (_COLOUR, [_TALL]),
    SPLIT_QUESTION: (_COLOUR, [_LARGE]),
    "two": (_COUNT, [_TALL, picture(120, 96, 3)]),
    "other question": (_PLACE, [_WIDE]),
}
_PAGE = Image.new("RGB", (330, 300), "white")
_PAGE.paste(picture(120, 80, 5), (90, 70))  # blank around it
_PAGE_QUESTION = (_COLOUR, [_PAGE])

_PADDING = " and the sky is blue on the right" * 6
"""Added to every question, so that image and text fill a block of the prefix cache."""

_LARGE_BUDGET = 4096
"""K above N of every image here; requests ask for less."""

_CLIP_BUDGET = "tokens_per_frame:2"
"""K of a clip, whose frames have 6 tokens."""

_STEPS_BETWEEN_PREEMPTIONS = 11
"""A prompt takes 6 to 9 steps and decoding 3 more, so that the first request is preempted while it
is decoded and the second while it is prefilled. A longer prompt needs more steps to be answered."""


def _settings(budget: int, **more: object) -> dict[str, Any]:
    """Settings of a server: CDPruner refined by signals that read question and attention.

    Rows stay as they are, because checks find tokens by them. The signals of ``autoprune``, of
    means and norms, are nearly equal for tokens of a random model, where the two model runners
    round in another way.
    """
    weights = {
        "instruction_guided_visual_relevance": 0.4,
        "attention_proxy_saliency": 0.2,
        "spatial_centrality_prior": 0.1,
        "redundancy_density_penalty": 0.2,
        "local_contrast_saliency": 0.1,
    }
    state = {
        **load_state("autoprune").model_dump(mode="json"),
        "scoring": {
            "signals": [
                {"atom": atom, "weight": weight} for atom, weight in weights.items()
            ],
            "kernel": {"atom": "pairwise_cosine_kernel"},
            "fusion": {"atom": "weighted_product_fusion"},
        },
        "constraints": {
            "pool": [
                {"atom": "quality_pool_builder"},
                {"atom": "diversity_pool_builder", "pool_ratio": 0.5},
            ],
            "selector": {"atom": "reference_residual_exchange_selector"},
        },
        "reassembly": {"atom": "mean_residual"},
        "frames": {"tokens": {"atom": "fixed_budget@640"}, "budget": "curvature"},
        "positions": "true",
    }
    return {"state": {**state, **more}, "budget": budget, "requests": "budget"}


# ---- an engine, asked and observed ----


class Engine:
    """A ``vllm.LLM`` of a model, whose worker is in this process where it has one rank."""

    def __init__(
        self, folder: Path, settings: Mapping[str, object] | None, **options: Any
    ) -> None:
        """Start it, with a state unless ``settings`` is None."""
        from vllm import LLM

        if settings is not None:
            options["additional_config"] = {"autoprune": dict(settings)}
        usual = {"enforce_eager": True, "dtype": choose_dtype(), "block_size": BLOCK}
        self.llm: Any = LLM(model=str(folder), **{**usual, **options})

    @property
    def runner(self) -> Any:
        """The model runner."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    @property
    def model(self) -> Any:
        """The model object."""
        return self.runner.model

    @property
    def runs(self) -> int:
        """Runs of the vision tower on requests so far."""
        return int(self.model.autoprune.runs)

    def empty_caches(self) -> None:
        """Empty vLLM's caches, and with them the plugin's."""
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def stop(self) -> None:
        """End it, so that this process can start another one."""
        self.llm.llm_engine.engine_core.shutdown()
        # vLLM collects garbage several times during a start, which takes half of the start-up time
        # of an engine of this size.
        gc.freeze()


class _TinyEngine(Engine):
    """Records positions that the language model receives, and rows of images."""

    def __init__(
        self, folder: Path, settings: Mapping[str, object] | None, **options: object
    ) -> None:
        from vllm.multimodal import MULTIMODAL_REGISTRY

        # vLLM's linear attention on a CPU takes bfloat16 only (cpu_gdn_attention_core).
        if "linear_attention" in (folder / "config.json").read_text():
            options["dtype"] = "bfloat16"
        super().__init__(
            folder,
            settings,
            max_model_len=1536,
            num_gpu_blocks_override=128,
            limit_mm_per_prompt={"image": 4},
            **options,
        )
        self.config = self.llm.llm_engine.vllm_config
        self.processor: Any = MULTIMODAL_REGISTRY.create_processor(
            self.config.model_config
        )
        self.features: list[ImageFeatures] = []
        self._positions: list[Tensor] = []

        def record(
            layer: nn.Module, inputs: Sequence[Tensor], named: Mapping[str, Tensor]
        ) -> None:
            positions = named["positions"] if "positions" in named else inputs[0]
            self._positions.append(positions.clone())

        language_model = self.model.get_language_model()
        # vLLM calls the model without its hooks; Idefics3's has no head around it.
        layers = getattr(language_model, "model", language_model).layers
        layers[0].register_forward_pre_hook(record, with_kwargs=True)

    @contextmanager
    def preempting(self, interval: int = _STEPS_BETWEEN_PREEMPTIONS) -> Iterator[None]:
        """Preempt running requests every ``interval`` steps, during prefill and during decoding."""
        engine = self.llm.llm_engine
        step = engine.step
        steps = itertools.count(1)

        def step_with_preemption() -> Any:
            if next(steps) % interval == 0:
                engine.reset_prefix_cache(reset_running_requests=True)
            return step()

        with patch.object(engine, "step", step_with_preemption):
            yield

    @contextmanager
    def recording_rows(
        self, texts: list[list[int]] | None = None
    ) -> Iterator[list[list[int]]]:
        """Record the features of images; yields which of its unpruned rows each row of one is.

        Rows of text count among those of a clip, and are left out of those of an image. ``texts``
        gets, for each image, how many rows of tokens stand before each row of its text.
        """
        kept: list[list[int]] = []

        def prune_and_record(
            context: SelectionContext,
            plans: Sequence[ItemPlan],
            images: Sequence[ImageFeatures],
        ) -> list[Tensor]:
            selected = prune_images(context, plans, images)
            for plan, image, rows in zip(plans, images, selected, strict=True):
                unpruned = image.rows()
                rows = rows[:, : unpruned.shape[1]]  # without the positions of one axis
                columns = torch.ones(rows.shape[1], dtype=torch.bool)
                if (
                    context.parts.set_times is not None
                ):  # written where text stands between tokens
                    columns[-count_channels(context.parts.axes) :] = False
                unpruned = unpruned[:, columns]
                equal = (rows[:, None, columns] == unpruned).all(dim=2).to(torch.int8)
                is_token = equal.any(dim=1)
                place = torch.where(is_token, equal.argmax(dim=1), -1)
                if plan.text:
                    before, ids = torch.tensor(plan.text, device=rows.device).T
                    text = context.parts.embed(ids)
                    if torch.equal(rows[~is_token, : text.shape[1]], text):
                        if plan.frames:
                            place += torch.searchsorted(before, place, right=True)
                            place[~is_token] = before + torch.arange(len(before))
                        else:
                            place = place[is_token]
                kept.append(place.tolist())
                self.features.append(image)
                if texts is not None:
                    texts.append(is_token.cumsum(0)[~is_token].tolist())
            return selected

        with patch.object(pruned_model, "prune_images", prune_and_record):
            yield kept

    def ask(
        self,
        question: _Question,
        budget: int | None = None,
        preempted: bool = False,
        later: Sequence[str] = (),
        **fields: object,
    ) -> Completion:
        """The completion of a text about images and ``later`` turns; ``fields`` of the entry."""
        text, images = question
        content: list[dict[str, object]] = [
            {"type": "image_pil", "image_pil": image} for image in images
        ]
        content.append({"type": "text", "text": text + _PADDING})
        messages: list[dict[str, object]] = [{"role": "user", "content": content}]
        for turn in later:
            messages.append({"role": "assistant", "content": "blue"})
            messages.append({"role": "user", "content": turn})
        entry = fields if budget is None else {"budget": budget, **fields}
        options = {"mm_processor_kwargs": {"autoprune": entry}} if entry else {}
        return self._complete(self.llm.chat, messages, preempted, **options)

    def ask_each(
        self, questions: Mapping[str, _Question], *more: Any, **fields: Any
    ) -> dict[str, Completion]:
        """:meth:`ask` for questions by their names."""
        return {
            name: self.ask(question, *more, **fields)
            for name, question in questions.items()
        }

    def converse(self, recall: bool = True, preempted: bool = False) -> Completion:
        """The completion of a third turn; the second and the third recall tokens if they may."""
        fields = {"recall": RECALL} if recall else {}
        question = _QUESTIONS[SPLIT_QUESTION]
        return self.ask(question, None, preempted, (_PLACE, _COUNT), **fields)

    def ask_video(self, name: str = "video", **fields: object) -> dict[str, Completion]:
        """The completion about a video of four frames, by a name, where the model takes one.

        ``fields`` are those of the request's entry.
        """
        if "video" not in self.processor.info.get_supported_mm_limits():
            return {}
        placeholder = type(self.model).get_placeholder_str("video", 0)
        text = f"user {placeholder} what is on the left you"
        prompt: dict[str, Any] = {
            "prompt": text,
            "multi_modal_data": {"video": clip(4)},
        }
        if fields:
            prompt["mm_processor_kwargs"] = {"autoprune": fields}
        return {name: self._complete(self.llm.generate, prompt)}

    def _complete(
        self,
        submit: Callable[..., Any],
        prompt: object,
        preempted: bool = False,
        **options: object,
    ) -> Completion:
        """Positions are those of the tokens computed first, or last where it was preempted."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=4, logprobs=0, ignore_eos=True
        )
        (output,) = submit([prompt], sampling, use_tqdm=False, **options)
        generated = output.outputs[0]
        cached = 0 if preempted else output.num_cached_tokens or 0
        tokens = list(output.prompt_token_ids)
        ids = list(generated.token_ids)
        computed = len(tokens) + len(ids) - 1 - cached
        axes = torch.cat(self._positions, dim=-1)
        axes = axes.reshape(-1, axes.shape[-1])
        self._positions.clear()
        return Completion(
            prompt=tokens,
            ids=ids,
            logprob=float(generated.cumulative_logprob),
            cached=cached,
            positions=(
                axes[:, -computed:] if preempted else axes[:, :computed]
            ).tolist(),
        )


# ---- the report ----


def serve(folder: Path) -> Report:  # noqa: PLR0915
    """The report of a model in a folder."""
    from vllm.multimodal.parse import ImageSize

    results: dict[str, Any] = {}
    completions: dict[str, dict[str, Completion]] = {}
    engine = _TinyEngine(folder, None)
    results["hybrid"] = engine.config.model_config.is_hybrid
    results["mixed"] = len(engine.runner.kv_cache_config.kv_cache_groups) > 1
    results["runner"] = "v2" if engine.config.use_v2_model_runner else "v1"
    completions["stock"] = engine.ask_each(_QUESTIONS)
    completions["stock others"] = engine.ask_video()
    completions["cells"] = cells = {"stock": engine.ask(_PAGE_QUESTION)}
    engine.stop()
    if completions["stock others"]:  # small steps round in another way than large ones
        engine = _TinyEngine(folder, None, max_num_batched_tokens=8, max_num_seqs=2)
        completions["stock others"] |= engine.ask_video("chunked video")
        engine.stop()

    engine = _TinyEngine(folder, _settings(_LARGE_BUDGET))
    results["placed"] = engine.model.autoprune_axes > 0
    placeholders = engine.processor._placeholders
    info = engine.processor.info
    results["predicted"] = predicted = {
        name: [
            placeholders.count(info, ImageSize(*image.size), {}).tokens
            for image in images
        ]
        for name, (_, images) in _QUESTIONS.items()
    }
    completions["whole"] = engine.ask_each(_QUESTIONS)
    completions["others"] = engine.ask_video()
    completions["pruned"], completions["again"], results["kept"] = {}, {}, {}
    results["texts"] = texts = {name: list[list[int]]() for name in _QUESTIONS}
    runs = engine.runs
    for name, question in _QUESTIONS.items():
        with engine.recording_rows(texts[name]) as results["kept"][name]:
            completions["pruned"][name] = engine.ask(question, SMALL_BUDGET)
        completions["again"][name] = engine.ask(question, SMALL_BUDGET)
    images = {id(image) for _, pictures in _QUESTIONS.values() for image in pictures}
    results["vision_runs"] = engine.runs - runs - len(images)
    engine.empty_caches()
    completions["alone"] = engine.ask_each(
        {name: _QUESTIONS[name] for name in ("other question", "wide")}, SMALL_BUDGET
    )
    results["cells"] = None
    with suppress(RequestError), engine.recording_rows():
        cells["left"] = engine.ask(_PAGE_QUESTION, cells="flat")
        kept = engine.features[-1].regions[0].grid
        results["cells"] = kept.at_tokens(
            torch.arange(kept.height * kept.width)
        ).tolist()
        cells["few"] = engine.ask(_PAGE_QUESTION, SMALL_BUDGET, cells="flat")
        engine.empty_caches()
        cells["alone few"] = engine.ask(_PAGE_QUESTION, SMALL_BUDGET, cells="flat")
    completions["clips"], results["clip"] = {}, None
    with suppress(RequestError), engine.recording_rows() as results["clip"]:
        completions["clips"] |= engine.ask_video("few", video_budget=_CLIP_BUDGET)
        engine.empty_caches()
        completions["clips"] |= engine.ask_video("alone few", video_budget=_CLIP_BUDGET)
    reporter = engine.model.autoprune_reporter
    results["fallbacks"] = sum(
        n for (kind, _), n in reporter.counts().items() if kind != "none"
    )
    results["errors"] = dict(reporter.errors)
    engine.stop()

    settings = _settings(SMALL_BUDGET)
    engine = _TinyEngine(folder, settings, max_num_batched_tokens=8, max_num_seqs=2)
    completions["chunked"] = engine.ask_each(_QUESTIONS)
    completions["others"] |= engine.ask_video("chunked video")
    if completions["clips"]:
        completions["clips"] |= engine.ask_video(
            "chunked few", video_budget=_CLIP_BUDGET
        )
    if results["cells"] is not None:
        cells["chunked few"] = engine.ask(_PAGE_QUESTION, cells="flat")
        cells["chunked left"] = engine.ask(_PAGE_QUESTION, _LARGE_BUDGET, cells="flat")
    engine.llm.reset_prefix_cache()
    longest = max(
        len(completion.prompt) for completion in completions["chunked"].values()
    )
    with engine.preempting(max(_STEPS_BETWEEN_PREEMPTIONS, longest // 8 + 3)):
        completions["preempted"] = engine.ask_each(
            {name: _QUESTIONS[name] for name in ("high", "two")}, preempted=True
        )
    backbone = BACKBONES[engine.config.model_config.architecture]
    engine.stop()

    # A state with a core, which ranks tokens before the patch merger where the model has one: one
    # image, three questions, and a conversation.
    (size,) = predicted[SPLIT_QUESTION]
    merger = TINY_MODELS.get(backbone.name, {}).get("merger")
    ranking = {} if merger is None else {"rank_at": "merger_in"}
    settings = _settings(min(SPLIT_BUDGET, size - 1), core={"share": 0.7}, **ranking)
    colour, place, number = ((text, [_LARGE]) for text in (_COLOUR, _PLACE, _COUNT))
    engine = _TinyEngine(folder, settings)
    # Whether images of the model can be several items of a prompt.
    results["splittable"] = recall = not engine.processor._placeholders.unsplittable
    completions["split"] = split = {}
    with engine.recording_rows() as results["split_kept"]:
        split["first"] = engine.ask(colour)
    results["merger_error"] = merger and _measure_merger_error(
        folder, _LARGE, engine.features[0], merger
    )
    with engine.recording_rows() as results["recalled"]:
        split["third"] = engine.converse(recall)
    split["second"], split["further"] = engine.ask(place), engine.ask(number)
    engine.empty_caches()
    split["alone second"], split["again first"] = engine.ask(place), engine.ask(colour)
    engine.empty_caches()
    split["alone third"] = engine.converse(recall)
    results["recall_refused"] = False
    if not recall:
        try:
            engine.converse()
        except RequestError:
            results["recall_refused"] = True
    engine.stop()

    engine = _TinyEngine(folder, settings, max_num_batched_tokens=16, max_num_seqs=2)
    split["chunked first"], split["chunked second"] = (
        engine.ask(colour),
        engine.ask(place),
    )
    engine.llm.reset_prefix_cache()
    split["chunked third"] = engine.converse(recall)
    engine.llm.reset_prefix_cache()
    with engine.preempting():
        split["preempted second"] = engine.ask(place, preempted=True)
        split["preempted third"] = engine.converse(recall, preempted=True)
    engine.stop()
    return Report(completions=completions, **results)


# ---- what enters the patch merger ----

_MERGER_INPUT: tuple[Signal, Signal] = ("encoder", "merger_norms")
_TOWER_INPUTS = ("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids")
"""Of ``get_image_features``, where a model takes them."""


@torch.no_grad()
def _measure_merger_error(
    folder: Path, image: Image.Image, features: ImageFeatures, merger: Mapping[str, Any]
) -> float:
    """Largest error of a token's row or norms, relative to how much tokens differ.

    Of the features that an engine made of the image, against transformers in float32.
    """
    ranked = [
        [region.signals[name] for region in features.regions] for name in _MERGER_INPUT
    ]
    orders = [region.order for region in features.regions if region.order is not None]
    errors = []
    read = _read_merger_input(folder, image, merger, features.regions[0].grid)
    for parts, expected in zip(ranked, read, strict=True):
        rows = torch.cat(parts)
        rows = rows[torch.cat(orders).argsort()] if orders else rows
        deviation = (expected - expected.mean(dim=0)).pow(2).mean(dim=0).sum().sqrt()
        errors.append((rows - expected).norm(dim=1).max() / deviation)
    return float(torch.stack(errors).max())


def _read_merger_input(
    folder: Path, image: Image.Image, merger: Mapping[str, Any], grid: Grid
) -> tuple[Tensor, Tensor]:
    """Rows ``(N, C)`` and norms ``(N, 2)`` of one image, in raster order, by transformers.

    ``merger`` is what ``tiny_models.toml`` says of the model's; ``grid`` that of an image which is
    no tiles.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = folder / ORIGINAL if (folder / ORIGINAL).exists() else folder
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    inputs = AutoProcessor.from_pretrained(folder).image_processor(
        [image], return_tensors="pt"
    )
    entering: dict[str, Tensor] = {}
    for part in merger.keys() & {"module", "scored"}:

        def record(
            _: nn.Module,
            args: Sequence[Tensor],
            named: Mapping[str, Tensor],
            part: str = part,
        ) -> None:
            entering[part] = [*args, *named.values()][0].flatten(0, -2)

        attrgetter(merger[part])(model).register_forward_pre_hook(
            record, with_kwargs=True
        )
    model.get_image_features(
        **{name: inputs[name] for name in _TOWER_INPUTS if name in inputs}
    )

    vision = model.config.vision_config
    order = merger.get("order", "cells")

    def split(patches: Tensor) -> Tensor:
        """``(N, patches, C)``."""
        cells: Tensor
        if order == "joined":
            cells = patches.unflatten(1, (-1, vision.hidden_size))
        elif order == "channels":
            cells = patches.unflatten(1, (vision.hidden_size, -1)).transpose(1, 2)
        elif order == "raster":
            side = merger.get("side", 2)
            cells = patches[: grid.tokens * side**2].unflatten(
                0, (grid.height, side, -1, side)
            )
            cells = cells.transpose(1, 2).flatten(0, 1).flatten(1, 2)
        else:
            cells = patches.unflatten(0, (-1, 4))
        if order == "windows":
            from transformers.vision_utils import get_vision_window_index

            unit = vision.spatial_merge_size, vision.window_size, vision.patch_size
            cells = cells[
                get_vision_window_index(inputs["image_grid_thw"], *unit)[0].argsort()
            ]
        return cells

    scored = entering.get("scored", entering["module"])
    # Norms of a token whose patches are joined are those of its one row.
    rows = scored[:, None] if order in ("joined", "channels") else split(scored)
    norms = torch.stack([rows.norm(1, dim=2), rows.norm(dim=2)], dim=2).mean(dim=1)
    return split(entering["module"]).mean(dim=1), norms


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        report = serve(build(sys.argv[1], Path(folder)))
    print(REPORT_PREFIX + report.model_dump_json())
