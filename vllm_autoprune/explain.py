"""Traces of token selections: which tokens of an image or a video a policy keeps, and why.

A vLLM engine in this process selects the tokens, with the code of a server, for every backbone. A
trace has the reference selection, the exchanged tokens and every signal; ``picture`` draws it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from PIL import Image
from torch import Tensor

from vllm_autoprune.backbones import read_config
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.pictures import Video
from vllm_autoprune.ops.rowwise import min_max_normalise
from vllm_autoprune.serving.models import BACKBONES, require_served
from vllm_autoprune.tpdsl.atoms.signals import run_signal
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.base_policy import FALLBACKS, RefinedTokens
from vllm_autoprune.tpdsl.materialize import PruningPolicy
from vllm_autoprune.tpdsl.registry import run
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens

if TYPE_CHECKING:
    from vllm import LLM

    from vllm_autoprune.serving.models.vision import ImageInputs
    from vllm_autoprune.serving.worker.features import ImageFeatures

_LONGEST_PROMPT = 8192
"""Maximum tokens of a prompt: the kept tokens and the question."""

_Selection = tuple[PruningPolicy, VisualTokens, RefinedTokens]
"""Policy with a region's share of K, all tokens of the region, and the result of selection."""


@dataclass(frozen=True, slots=True)
class _SignalTrace:
    """One signal over all N tokens, normalised to 0..1 as the fusion sees it."""

    atom: str
    title: str
    """Name of what the atom measures with its parameters."""
    weight: float
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Trace of the selection from one region of an image, or from a video.

    Indices are into its N tokens in raster order, in a video frame after frame.
    """

    grid: Grid
    reference: tuple[int, ...]
    """Tokens that the base policy picks, in order of selection."""
    kept: tuple[int, ...]
    """Tokens that the state keeps, ascending as are ``left``, ``entered`` and ``core``."""
    left: tuple[int, ...]
    entered: tuple[int, ...]
    core: tuple[int, ...]
    extra: int
    """E, number of extra rows of the base policy, which are merged from several tokens."""
    signals: tuple[_SignalTrace, ...]
    """Signals that quality is fused from; empty if ``quality`` is None."""
    quality: tuple[float, ...] | None
    """Quality g of all tokens; None if it chose none of them, although it may order rows."""
    fallback: str
    """One of ``tpdsl.base_policy.FALLBACKS``."""
    decided_by: str
    """What chose the tokens, and the layers of the model that it read."""

    @property
    def kept_by_frame(self) -> tuple[int, ...]:
        """K_t, number of tokens kept of each frame of a video or each tile, without merged rows."""
        frames = [token // self.grid.per_tile for token in self.kept]
        return tuple(map(frames.count, range(self.grid.tiles)))

    @classmethod
    @torch.no_grad()
    def of(
        cls, policy: PruningPolicy, tokens: VisualTokens, refined: RefinedTokens
    ) -> Trace:
        """Trace a selection: ``refined`` is the result of ``policy`` on ``tokens``."""
        policy = policy.at(tokens.count, tokens.grid.tiles)
        fallback = FALLBACKS[int(refined.fallback[0])]
        quality = None
        signals: tuple[_SignalTrace, ...] = ()
        if policy.refines and refined.quality is not None and fallback == "none":
            quality = tuple(refined.quality[0].tolist())
            signals = _trace_signals(policy, tokens, refined.reference)
        reads = _describe_reads(policy, tokens)
        if quality is not None:
            decided_by = f"{policy.base.name}{reads}, then quality g"
        elif not policy.state.reassembly.idle:
            decided_by = f"{policy.base.name}{reads}, then merging"
        else:
            decided_by = f"{policy.base.name} alone{reads}"
        indices = refined.indices[0].tolist()
        reference = refined.reference[0].tolist()
        core = indices[: policy.core] if policy.budget < tokens.count else []
        return cls(
            grid=tokens.grid,
            reference=tuple(reference),
            kept=tuple(sorted(indices)),
            left=tuple(sorted(set(reference) - set(indices))),
            entered=tuple(sorted(set(indices) - set(reference))),
            core=tuple(sorted(core)),
            extra=refined.extra,
            signals=signals,
            quality=quality,
            fallback=fallback,
            decided_by=decided_by,
        )


def _trace_signals(
    policy: PruningPolicy, tokens: VisualTokens, reference: Tensor
) -> tuple[_SignalTrace, ...]:
    """Compute the signals that quality is fused from; those of weight 0 are skipped."""
    state = policy.state
    view = run(VisualTokens, state.source.tokens, state.ranked(tokens))
    signals = []
    for call in state.scoring.signals:
        if call.weight > 0:
            values = min_max_normalise(run_signal(call, view, reference))[0]
            signals.append(
                _SignalTrace(call.atom, call.title, call.weight, tuple(values.tolist()))
            )
    return tuple(signals)


def _describe_reads(policy: PruningPolicy, tokens: VisualTokens) -> str:
    """Phrase that names the layers of the model that the base policy reads; empty if none."""
    params = policy.state.base_policy.params
    needs = policy.base.needs_of(params)
    language = tokens.language
    layers = []
    if "tower" in needs:
        layers.append("the vision tower's layer before the projector")
    if "next_layer" in needs:
        layers.append("the layer after it")
    if language and (count := params.layers_read(language.layers)):
        layers.append(f"the first {count} of {language.layers} language model layers")
    return f" (reads {' and '.join(layers)})" if layers else ""


@dataclass(frozen=True)
class Explanation:
    """What a policy keeps of one region of an image, or of a video, for one question.

    The budget of ``policy`` is the region's share of K. ``region`` is the region's name if the
    image has several. The grid of ``trace`` covers ``picture``, or each of the ``frames`` of a
    video.
    """

    picture: Image.Image
    question: str
    policy: PruningPolicy
    trace: Trace
    region: str = ""
    frames: Sequence[Image.Image] = ()
    """First frame of each temporal group of a video; empty for an image."""

    @property
    def summary(self) -> str:
        """One line: state, number of tokens kept, and number exchanged."""
        trace = self.trace
        state = self.policy.state
        summary = f"{self.region}: " if self.region else ""
        summary += f"{state.name} ({state.digest[:12]}) keeps {len(trace.kept) + trace.extra} of "
        summary += f"{trace.grid.tokens} visual tokens"
        if trace.grid.video:
            minimum = min(trace.kept_by_frame)
            maximum = max(trace.kept_by_frame)
            summary += f" in {trace.grid.tiles} frames, {minimum} to {maximum} of each"
        if trace.fallback != "none":
            return f"{summary}; its scores were not finite, {trace.fallback} selection instead"
        if trace.core and state.core is not None:
            core = (
                f"; {len(trace.core)} of them are the core, by {state.core.policy.name}"
            )
            summary += core
        return (
            f"{summary}; {len(trace.entered)} exchanged; decided by {trace.decided_by}"
        )


def explain_image(
    checkpoint: Path,
    text_tower: Path | None,
    policy: PruningPolicy,
    image: Image.Image | Video,
    question: str,
) -> list[Explanation]:
    """Explain what a server with the state of ``policy`` keeps of an image or a video.

    Returns an explanation of each region of the image, or one of the video. Raises
    :class:`ConfigError` for a folder without a checkpoint, for a K that is not below N, and for a
    video if the model serves videos whole; :class:`UnsupportedModelError` for architectures that
    are not served.
    """
    backbone = require_served(read_config(str(checkpoint)))
    video = image if isinstance(image, Video) else None
    if video is not None and not backbone.videos:
        names = ", ".join(row.name for row in BACKBONES.values() if row.videos)
        raise ConfigError.of(
            str(checkpoint),
            f"is a {backbone.name}, whose videos are served whole",
            f"give one of {names}",
            subject="explain",
        )
    if video is not None:
        _require_place_of_videos(checkpoint)
    budget = policy.by_size or BudgetCall.parse(policy.budget)
    llm = _start_engine(checkpoint, _list_settings(policy, budget, text_tower), video)
    with _record(llm) as (selections, tiles):
        _ask(llm, image, question)
    if not selections:
        visual = "image" if video is None else "video"
        raise ConfigError.of(
            "--budget",
            f"K = {budget.rule()} keeps every token of this {visual}",
            "give a smaller K",
            subject="explain",
        )
    if isinstance(image, Video):
        policy, tokens, refined = selections[0]
        trace = Trace.of(policy, tokens, refined)
        # A temporal group has several frames; its first frame is drawn.
        size = len(image.frames) / trace.grid.tiles
        frames = [image.frames[int(group * size)] for group in range(trace.grid.tiles)]
        picture = image.frames[0]
        return [Explanation(picture, question, policy, trace, frames=frames)]
    pictures = _draw_regions(selections, image, tiles, checkpoint)
    explanations = []
    for number, (policy, tokens, refined) in enumerate(selections):
        region = ""
        if len(selections) > 1:
            region = f"region {number + 1} of {len(selections)}"
        trace = Trace.of(policy, tokens, refined)
        picture = pictures[number]
        explanations.append(Explanation(picture, question, policy, trace, region))
    return explanations


def _require_place_of_videos(checkpoint: Path) -> None:
    """Raise :class:`ConfigError` for a chat template that leaves videos out of the prompt.

    vLLM would fail on such a prompt with an AssertionError.
    """
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(checkpoint)
    if processor.chat_template is None:
        return
    prompts = {
        processor.apply_chat_template([{"role": "user", "content": parts}])
        for parts in ([{"type": "video"}], [])
    }
    if len(prompts) == 1:
        what = "has a chat template that leaves out videos"
        fix = "give a checkpoint whose template has a place for them"
        raise ConfigError.of(str(checkpoint), what, fix, subject="explain")


def _list_settings(
    policy: PruningPolicy, budget: BudgetCall, text_tower: Path | None
) -> dict[str, object]:
    """Plugin settings to serve the state of ``policy`` with ``budget``, without dropping cells."""
    state = policy.state
    settings: dict[str, object] = {
        "state": state.model_dump(mode="json"),
        "cells": "none",
        "tower": "none",
    }
    of_state = state.budget
    if policy.video and state.frames is not None:
        of_state = state.frames.tokens
    if budget != of_state:
        settings["video_budget" if policy.video else "budget"] = budget.rule()
    if text_tower is not None:
        settings["text_tower"] = str(text_tower)
    return settings


def _start_engine(
    checkpoint: Path, settings: dict[str, object], video: Video | None
) -> LLM:
    """Start an engine in this process, whose prompts may have one image or one video."""
    for name, value in (
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),  # `_record` needs its model here
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),
    ):
        os.environ.setdefault(name, value)
    from transformers import AutoConfig
    from vllm import LLM

    config = AutoConfig.from_pretrained(checkpoint).get_text_config()
    longest = min(_LONGEST_PROMPT, config.max_position_embeddings)
    return LLM(
        str(checkpoint),
        dtype="bfloat16",
        enforce_eager=True,
        # Without a prefix cache the plugin does not split an image into core and delta items.
        enable_prefix_caching=False,
        max_model_len=longest,
        max_num_batched_tokens=longest,
        max_num_seqs=1,
        limit_mm_per_prompt={"image": 1, "video": int(video is not None)},
        skip_mm_profiling=True,
        use_tqdm_on_load=False,
        disable_log_stats=True,
        additional_config={"autoprune": settings},
    )


def _ask(llm: LLM, image: Image.Image | Video, question: str) -> None:
    """Prefill the question, so that its selection is recorded; the answer is not read.

    Raises :class:`ConfigError` if the prompt is too long.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    fix = "ask a shorter one"
    visual: dict[str, object] = {"type": "image_pil", "image_pil": image}
    if isinstance(image, Video):
        fix += ", or give fewer or smaller frames"
        visual = {"type": "video_url", "video_url": {"url": image.url}}
    text = {"type": "text", "text": question}
    message: Any = {"role": "user", "content": [visual, text]}
    try:
        llm.chat([message], SamplingParams(max_tokens=1), use_tqdm=False)
    except (VLLMValidationError, ValueError) as error:
        what = str(error).partition("\n")[0]
        raise ConfigError.of("question", what, fix, subject="explain") from None


@contextmanager
def _record(
    llm: LLM,
) -> Iterator[tuple[list[_Selection], list[tuple[Tensor, ImageFeatures]]]]:
    """Record every selection of an engine in this process while the context is open.

    Yields two lists that the engine fills: the selections, and pairs of the pixels
    ``(T, 3, H, W)`` of an image's tiles and their features. The second list stays empty for models
    that take patches instead of pixels.
    """
    from vllm_autoprune.serving.models.pruned_model import PrunedModel
    from vllm_autoprune.serving.worker import batch
    from vllm_autoprune.serving.worker.selection import select_with_fallback

    (model,) = llm.apply_model(lambda model: model)
    assert isinstance(model, PrunedModel) and model.autoprune is not None
    vision = model.autoprune
    selections = list[_Selection]()
    tiles = list[tuple[Tensor, "ImageFeatures"]]()
    encode = vision.encode

    def select_and_record(
        policy: PruningPolicy, tokens: VisualTokens, *more: Any
    ) -> RefinedTokens:
        refined = select_with_fallback(policy, tokens, *more)
        selections.append((policy, tokens, refined))
        return refined

    def encode_and_record(images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        features = encode(images)
        pixels = images[0].get("pixel_values")
        if pixels is not None and pixels.ndim >= 3:
            tiles.append((pixels.reshape(-1, *pixels.shape[-3:]), features[0]))
        return features

    with (
        patch.object(batch, "select_with_fallback", select_and_record),
        patch.object(vision, "encode", encode_and_record),
    ):
        yield selections, tiles


def _draw_regions(
    selections: Sequence[_Selection],
    image: Image.Image,
    tiles: Sequence[tuple[Tensor, ImageFeatures]],
    checkpoint: Path,
) -> list[Image.Image]:
    """Picture of each region: the image, its tiles side by side, or one tile.

    Tiles are drawn from the ``pixels`` that the model got, so they are resized and cropped.
    """
    if not tiles:
        return [image] * len(selections)
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(checkpoint)
    pixels, features = tiles[-1]
    normalised_by = (processor.image_mean, processor.image_std)
    mean, std = (torch.tensor(values)[:, None, None] for values in normalised_by)
    levels = ((pixels.cpu().float() * std + mean) * 255).round().clamp(0, 255).byte()
    pictures = [
        Image.fromarray(tile.numpy())
        for tile in levels.permute(0, 2, 3, 1).contiguous()
    ]
    if len(pictures) == 1:
        return pictures * len(selections)
    budget = sum(policy.budget for policy, _, _ in selections)
    if numbers := _find_tiles_of_regions(features, len(pictures), budget):
        return [pictures[tile] for tile in numbers]
    region = features.regions[0]
    if region.order is not None and region.grid.tiles == len(pictures):
        ranks = region.order[:: region.grid.per_tile].argsort().argsort()
        pictures = [pictures[tile] for tile in ranks.tolist()]
    width, height = pictures[0].size
    joined = Image.new("RGB", (width * len(pictures), height))
    for number, picture in enumerate(pictures):
        joined.paste(picture, (number * width, 0))
    return [joined if tokens.grid.tiles > 1 else image for _, tokens, _ in selections]


def _find_tiles_of_regions(
    features: ImageFeatures, tiles: int, budget: int
) -> list[int]:
    """Number of the tile of each region that has a share of K; empty if regions are not tiles."""
    regions = features.regions
    if len(regions) != tiles or tiles == 1 or regions[0].order is not None:
        return []
    return [tile for tile, share in enumerate(features.split(budget)) if share]
