"""Which tokens of an image a policy keeps and why: selected in an engine, and traced.

The engine runs in this process, with the code that serves, for every backbone. A trace has the
reference selection, the exchange and every signal; ``picture`` draws it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from vllm_autoprune.checkpoint import require_architecture
from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.ops.rowwise import min_max_normalise
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.tpdsl.atoms.reassembly import find_owners
from vllm_autoprune.tpdsl.atoms.scoring import run_signal
from vllm_autoprune.tpdsl.base_policy import FALLBACKS, Given, RefinedTokens
from vllm_autoprune.tpdsl.materialize import PruningPolicy
from vllm_autoprune.tpdsl.registry import run
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens

if TYPE_CHECKING:
    from vllm import LLM

    from vllm_autoprune.serving.models.pruned_model import ImageInputs
    from vllm_autoprune.serving.worker.features import ImageFeatures
    from vllm_autoprune.serving.worker.selection import FallbackReporter

_LONGEST_PROMPT = 8192
"""Tokens of the question and of the kept image at most."""

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

_EncodedTiles = tuple[Tensor, "ImageFeatures"]
"""Pixels ``(T, 3, H, W)`` of an image's tiles, and the features that they were encoded to."""

_Selection = tuple[PruningPolicy, VisualTokens, RefinedTokens]
"""A policy with a region's share of K, the region's tokens, and what is kept of them."""


@dataclass(frozen=True, slots=True)
class SignalTrace:
    """One signal over all N tokens, normalised to 0..1 as the fusion sees it."""

    atom: str
    weight: float
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Trace of one image; indices are raster indices into its N tokens.

    ``reference`` is in order of selection, ``kept`` ascending; ``left`` and ``entered`` are the
    exchanged tokens, ascending; ``extra`` counts merged rows of the base policy, which are not
    single tokens; ``core`` are the tokens of the core, ascending; ``quality`` is g, None if the
    state does not score; ``fallback`` is one of ``tpdsl.base_policy.FALLBACKS``; ``owners`` has for
    every token the kept one that it is merged into most, or -1, and is empty where nothing is
    merged.
    """

    grid: Grid
    reference: tuple[int, ...]
    kept: tuple[int, ...]
    left: tuple[int, ...]
    entered: tuple[int, ...]
    extra: int
    signals: tuple[SignalTrace, ...]
    quality: tuple[float, ...] | None
    fallback: str
    core: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """What a policy keeps of one region of an image, for one question.

    ``policy`` has the region's share of K; ``region`` names it, where the image has several. The
    grid of ``trace`` covers ``picture``.
    """

    picture: Image.Image
    question: str
    policy: PruningPolicy
    trace: Trace
    region: str = ""

    @property
    def summary(self) -> str:
        """One line: state, number of tokens kept, and number exchanged."""
        trace, state = self.trace, self.policy.state
        kept, total = len(trace.kept) + trace.extra, trace.grid.tokens
        place = f"{self.region}: " if self.region else ""
        summary = f"{place}{state.name} ({state.digest[:12]}) keeps {kept} of {total} visual tokens"
        if trace.fallback != "none":
            return f"{summary}; its scores were not finite, {trace.fallback} selection instead"
        core = f"; {len(trace.core)} of them are the core" if trace.core else ""
        merged = sum(owner >= 0 for owner in trace.owners)
        into = f"; {merged} dropped ones are merged into them" if merged else ""
        return f"{summary}{core}; {len(trace.entered)} exchanged{into}"


def explain_image(
    checkpoint: Path,
    text_tower: Path | None,
    policy: PruningPolicy,
    image: Image.Image,
    question: str,
) -> list[Explanation]:
    """Each region of an image, and what a server with this policy's state keeps of it.

    Raises :class:`ConfigError` for folders without a checkpoint and where K is not below the
    image's tokens, :class:`UnsupportedModelError` for architectures that are not served.
    """
    require_architecture(checkpoint, BACKBONES)
    keep_engine_in_process()
    from transformers import AutoConfig
    from vllm import LLM, SamplingParams

    settings: dict[str, object] = {
        "state": policy.state.model_dump(mode="json"),
        "budget": policy.budget,
    }
    if text_tower is not None:
        settings["text_tower"] = str(text_tower)
    config = AutoConfig.from_pretrained(checkpoint).get_text_config()
    longest = min(_LONGEST_PROMPT, config.max_position_embeddings)
    llm = LLM(
        str(checkpoint),
        dtype="bfloat16",
        enforce_eager=True,
        # An image is one item, whole, where no cache could share a part of it.
        enable_prefix_caching=False,
        max_model_len=longest,
        max_num_batched_tokens=longest,
        max_num_seqs=1,
        limit_mm_per_prompt={"image": 1, "video": 0},
        skip_mm_profiling=True,
        use_tqdm_on_load=False,
        disable_log_stats=True,
        additional_config={"autoprune": settings},
    )
    content = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": question}]
    message = {"role": "user", "content": content}
    with record_selections() as selections, _record_tiles(llm) as tiles:
        llm.chat([message], SamplingParams(max_tokens=1), use_tqdm=False)
    if not selections:
        what = f"K = {policy.budget} keeps every token of this image"
        raise ConfigError("explain", [Problem("--budget", what, "give a smaller K")])
    pictures = _draw_regions(selections, image, tiles, checkpoint)
    explanations = []
    for number, (picture, selection) in enumerate(zip(pictures, selections, strict=True), 1):
        (trace,) = trace_images(*selection)
        region = f"region {number} of {len(selections)}" if len(selections) > 1 else ""
        explanations.append(Explanation(picture, question, selection[0], trace, region))
    return explanations


def keep_engine_in_process() -> None:
    """Set vLLM's environment so that an engine that starts later has its model in this process."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextmanager
def record_selections() -> Iterator[list[_Selection]]:
    """Record every selection of an engine in this process while the context is open."""
    from vllm_autoprune.serving.worker import regions
    from vllm_autoprune.serving.worker.selection import select_with_fallback

    selections: list[_Selection] = []

    def select_and_record(
        policy: PruningPolicy,
        tokens: VisualTokens,
        reporter: FallbackReporter,
        earlier: Given | None = None,
        known: Sequence[Tensor | None] = (),
    ) -> RefinedTokens:
        refined = select_with_fallback(policy, tokens, reporter, earlier, known)
        selections.append((policy, tokens, refined))
        return refined

    regions.select_with_fallback = select_and_record  # type: ignore[attr-defined]
    try:
        yield selections
    finally:
        regions.select_with_fallback = select_with_fallback  # type: ignore[attr-defined]


@contextmanager
def _record_tiles(llm: LLM) -> Iterator[list[_EncodedTiles]]:
    """Record the pixels and the features of images, but for models that take patches."""
    from vllm_autoprune.serving.models.pruned_model import PrunedModel

    (model,) = llm.apply_model(lambda model: model)
    assert isinstance(model, PrunedModel) and model.autoprune is not None
    vision = model.autoprune
    encode, tiles = vision.encode, list[_EncodedTiles]()

    def encode_and_record(images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        features = encode(images)
        pixels = images[0]["pixel_values"]
        if pixels.ndim >= 3:
            tiles.append((pixels.reshape(-1, *pixels.shape[-3:]), features[0]))
        return features

    vision.encode = encode_and_record  # type: ignore[method-assign]
    try:
        yield tiles
    finally:
        vision.encode = encode  # type: ignore[method-assign]


def _draw_regions(
    selections: Sequence[_Selection],
    image: Image.Image,
    tiles: Sequence[_EncodedTiles],
    checkpoint: Path,
) -> list[Image.Image]:
    """What each region shows: the image, its tiles side by side, or one tile, cropped."""
    if not tiles:
        return [image] * len(selections)
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(checkpoint)
    pixels, features = tiles[-1]
    pictures = [
        restore_picture(tile.cpu(), processor.image_mean, processor.image_std) for tile in pixels
    ]
    if len(pictures) == 1:
        return pictures * len(selections)
    budget = sum(policy.budget for policy, _, _ in selections)
    if shown := find_tiles_of_regions(features, len(pictures), budget):
        return [pictures[tile] for tile in shown]
    width, height = pictures[0].size
    joined = Image.new("RGB", (width * len(pictures), height))
    for number, picture in enumerate(pictures):
        joined.paste(picture, (number * width, 0))
    return [joined if tokens.grid.tiles > 1 else image for _, tokens, _ in selections]


def find_tiles_of_regions(features: ImageFeatures, tiles: int, budget: int) -> list[int]:
    """The tile that each region with a share of K shows; empty where regions are not tiles."""
    regions = features.regions
    if len(regions) != tiles or tiles == 1 or regions[0].order is not None:
        return []
    return [tile for tile, share in enumerate(features.split(budget)) if share]


def restore_picture(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Image.Image:
    """The picture of pixel values ``(3, H, W)`` that were normalised by channel."""
    shift, scale = (torch.tensor(values)[:, None, None] for values in (mean, std))
    levels = ((pixels.float() * scale + shift) * 255).round().clamp(0, 255).byte()
    return Image.fromarray(levels.permute(1, 2, 0).contiguous().numpy())


@torch.no_grad()
def trace_images(
    policy: PruningPolicy, tokens: VisualTokens, refined: RefinedTokens
) -> tuple[Trace, ...]:
    """Trace each of the B images, of which ``refined`` is the result of ``policy``."""
    policy = policy.at(tokens.count, tokens.grid.tiles)
    calls = policy.state.scoring.signals if refined.quality is not None else ()
    view = policy.state.ranked(tokens)
    view = run(VisualTokens, policy.state.source.tokens, view) if calls else tokens
    signals = [
        (call.atom, call.weight, min_max_normalise(run_signal(call, view, refined.reference)))
        for call in calls
        if call.weight > 0
    ]
    core = policy.core if policy.budget < tokens.count else 0
    # With a core, two policies merge, each into its own part.
    merges = policy.core == 0 and policy.budget < tokens.count
    owners = find_owners(policy.state.reassembly, tokens, refined.indices) if merges else None
    traces = []
    for image in range(tokens.batch):
        fallback = int(refined.fallback[image])
        reference = tuple(refined.reference[image].tolist())
        kept = tuple(sorted(refined.indices[image].tolist()))
        # A fallback merges nothing.
        row = [] if owners is None or fallback else owners[image].tolist()
        traces.append(
            Trace(
                grid=tokens.grid,
                reference=reference,
                kept=kept,
                left=tuple(sorted(set(reference) - set(kept))),
                entered=tuple(sorted(set(kept) - set(reference))),
                extra=refined.extra,
                signals=tuple(
                    SignalTrace(atom, weight, tuple(values[image].tolist()))
                    for atom, weight, values in signals
                ),
                quality=None if refined.quality is None else tuple(refined.quality[image].tolist()),
                fallback=FALLBACKS[fallback],
                core=tuple(refined.indices[image, :core].tolist()),
                owners=tuple(row) if any(owner >= 0 for owner in row) else (),
            )
        )
    return tuple(traces)
