"""Support table: backbones and features, with what was tested; docs/support.md is made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["yes", "refused", "no", "untested"]


@dataclass(frozen=True, slots=True)
class Support:
    """Support of one feature."""

    feature: str
    status: Status
    note: str


@dataclass(frozen=True, slots=True)
class BackboneSupport:
    """One served model family, by the name of its record in ``serving.models``.

    ``relevance`` is where states may measure it; ``attention`` is what policies that read [CLS]
    are given; ``tower`` says whether states may read inside the vision tower and the language
    model's first layers; ``seen`` is what the tests serve.
    """

    name: str
    title: str
    relevance: Literal["CLIP or embeddings", "embeddings"]
    attention: Literal["[CLS]", "mean"]
    tower: Status
    layout: str
    positions: Literal["one number", "time, height, width"]
    video: Literal["untouched", "none"]
    seen: str


_TINY = "tiny random weights"

BACKBONE_SUPPORT: tuple[BackboneSupport, ...] = (
    BackboneSupport(
        "llava", "LLaVA-1.5 (CLIP tower)", "CLIP or embeddings", "[CLS]", "yes",
        "one grid", "one number", "none", "trained mini-LLaVA, all tests",
    ),
    BackboneSupport(
        "llava_next", "LLaVA-NeXT (CLIP tower)", "CLIP or embeddings", "[CLS]", "yes",
        "base view and crops, newlines dropped", "one number", "none", _TINY,
    ),
    BackboneSupport(
        "llava_onevision", "LLaVA-OneVision (SigLIP tower)", "embeddings", "mean", "refused",
        "base view and crops, newlines dropped", "one number", "untouched", _TINY,
    ),
    BackboneSupport(
        "qwen2_vl", "Qwen2-VL", "embeddings", "mean", "refused",
        "one grid of any size", "time, height, width", "untouched", _TINY,
    ),
    BackboneSupport(
        "qwen2_5_vl", "Qwen2.5-VL", "embeddings", "mean", "refused",
        "one grid of any size", "time, height, width", "untouched", _TINY,
    ),
    BackboneSupport(
        "qwen3_vl", "Qwen3-VL", "embeddings", "mean", "refused",
        "one grid of any size, deepstack levels alike", "time, height, width", "untouched", _TINY,
    ),
    BackboneSupport(
        "qwen3_vl_moe", "Qwen3-VL-MoE", "embeddings", "mean", "refused",
        "one grid of any size, deepstack levels alike", "time, height, width", "untouched", _TINY,
    ),
    BackboneSupport(
        "internvl", "InternVL (`InternVLForConditionalGeneration`)", "embeddings", "mean",
        "refused", "equal tiles", "one number", "untouched", _TINY,
    ),
    BackboneSupport(
        "gemma3", "Gemma 3", "embeddings", "mean", "refused",
        "one grid, and one for each crop", "one number", "none", _TINY,
    ),
)  # fmt: skip
"""Every backbone that is served pruned. Any other architecture is refused at start-up."""


SUPPORT: tuple[Support, ...] = (
    Support("Any other architecture", "refused", "at start-up, naming those that are served"),
    Support("LLaVA with a SigLIP or Pixtral tower", "refused", "no [CLS] token to read"),
    Support(
        "Idefics3, SmolVLM, Pixtral",
        "refused",
        "their placeholders are split into rows or tiles with text between",
    ),
    Support(
        "Compiled vision towers, encoder CUDA graphs",
        "refused",
        "nothing could listen to them",
    ),
    Support("`/v1/chat/completions`, `LLM.chat`, `LLM.generate`", "yes", "one identity for all"),
    Support("Several images, several turns", "yes", "instruction of the turn with the image"),
    Support("Prefix caching, multi-modal caches", "yes", "image + state + K + instruction"),
    Support("Chunked prefill", "yes", "same tokens as whole prefill"),
    Support(
        "Budget, policy or whole state of one request",
        "yes",
        "what `--autoprune-requests` allows; all kinds in one step",
    ),
    Support(
        "Ranking before the patch merger (`rank_at`)",
        "yes",
        "Qwen-VL and InternVL; the others have no merger and refuse it",
    ),
    Support("Metrics of API servers and workers", "yes", "in `/metrics`, one API server or two"),
    Support("`--api-server-count` above 1", "yes", "both processes seen answering"),
    Support("Tensor parallelism", "yes", "TP = 2 on a CPU; ranks choose the same tokens"),
    Support("`image_embeds` inputs", "no", "served unpruned: they come without signals"),
    Support("Rust front end", "refused", "it bypasses Python processors"),
    Support("vLLM 0.32 on CPU, model runner V1", "yes", "what the tests run on"),
    Support("Model runner V2", "yes", "the same tokens as V1, on a CPU by Triton's interpreter"),
    Support("vLLM 0.33", "untested", "its sources have every hook, called the same way"),
    Support("GPUs, CUDA graphs", "untested", "not yet run"),
    Support("LoRA on the vision tower or projector", "refused", "features are kept by image"),
    Support("Sleep mode with a text tower", "untested", "its weights are not vLLM's to reload"),
    Support(
        "Pipeline parallelism, LoRA on the language model, speculative decoding",
        "untested",
        "not yet run",
    ),
)


def as_markdown() -> str:
    """Both tables as docs/support.md shows them."""
    lines = [
        "| backbone | tokens of an image | relevance | attention | inside the tower | positions "
        "| videos | seen on |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.title} | {row.layout} | {row.relevance} | {row.attention} | {row.tower} "
        f"| {row.positions} | {row.video} | {row.seen} |"
        for row in BACKBONE_SUPPORT
    ]
    lines += ["", "| | supported | |", "|---|---|---|"]
    lines += [f"| {row.feature} | {row.status} | {row.note} |" for row in SUPPORT]
    return "\n".join(lines) + "\n"
