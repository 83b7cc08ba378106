"""Dimensions of the backbones that a state can be transferred between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vllm_autoprune.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class BackboneShape:
    """Dimensions of one backbone: its language model and its grid of visual tokens.

    The language model has ``layers`` L of width ``width`` d, a gated feed-forward of width
    ``feed_forward`` m, and keys and values of width ``kv_width`` (KV heads x head width). An image
    is ``tiles`` grids of ``grid_height`` x ``grid_width`` tokens, as published tables count them.
    """

    name: str
    family: str
    layers: int
    width: int
    feed_forward: int
    kv_width: int
    grid_height: int
    grid_width: int
    tiles: int
    relevance: Literal["clip", "language"]
    """Embedding space in which relevance to the instruction is measured."""
    has_cls: bool
    """Whether the vision tower has a [CLS] token."""
    tower_rows: bool
    """Whether the vision tower has exactly one output row for each visual token."""
    source: str
    """Checkpoint and image size that these numbers are taken from."""

    @property
    def tokens(self) -> int:
        """Visual tokens of one image before pruning, N."""
        return self.grid_height * self.grid_width * self.tiles

    @property
    def sign(self) -> Literal["+", "-"]:
        """Sign of the cosine that means relevance.

        On the patch features that LLaVA reads, OpenAI's CLIP gives relevant patches the *smaller*
        cosine (CDPruner, appendix and code); a language model's embedding space does not.
        """
        return "-" if self.relevance == "clip" else "+"


LLAVA_7B = BackboneShape(
    name="llava-1.5-7b",
    family="llava",
    layers=32,
    width=4096,
    feed_forward=11008,
    kv_width=4096,
    grid_height=24,
    grid_width=24,
    tiles=1,
    relevance="clip",
    has_cls=True,
    tower_rows=True,
    source="llava-hf/llava-1.5-7b-hf: Vicuna-7B, CLIP ViT-L/14 at 336 pixels",
)

LLAVA_13B = BackboneShape(
    name="llava-1.5-13b",
    family="llava",
    layers=40,
    width=5120,
    feed_forward=13824,
    kv_width=5120,
    grid_height=24,
    grid_width=24,
    tiles=1,
    relevance="clip",
    has_cls=True,
    tower_rows=True,
    source="llava-hf/llava-1.5-13b-hf: Vicuna-13B, CLIP ViT-L/14 at 336 pixels",
)

LLAVA_NEXT_7B = BackboneShape(
    name="llava-next-7b",
    family="llava_next",
    layers=32,
    width=4096,
    feed_forward=11008,
    kv_width=4096,
    grid_height=24,
    grid_width=24,
    tiles=5,
    relevance="clip",
    has_cls=True,
    tower_rows=True,
    source="llava-v1.6-vicuna-7b-hf; 672 x 672 pixels: one base view and 2 x 2 crops, no newlines",
)

QWEN_7B = BackboneShape(
    name="qwen2.5-vl-7b",
    family="qwen2_5_vl",
    layers=28,
    width=3584,
    feed_forward=18944,
    kv_width=4 * 128,
    grid_height=36,
    grid_width=36,
    tiles=1,
    relevance="language",
    has_cls=False,
    tower_rows=False,
    source="Qwen/Qwen2.5-VL-7B-Instruct; 1008 x 1008 pixels, 28 pixels a merged token",
)

BACKBONE_SHAPES: dict[str, BackboneShape] = {
    g.name: g for g in (LLAVA_7B, LLAVA_13B, LLAVA_NEXT_7B, QWEN_7B)
}


def find_backbone(name: str) -> BackboneShape:
    """Look up a backbone by name; :class:`ConfigError` lists the known names."""
    if name not in BACKBONE_SHAPES:
        known = ", ".join(BACKBONE_SHAPES)
        raise ConfigError(
            "backbone", [Problem(name, "not a known backbone", f"use one of {known}")]
        )
    return BACKBONE_SHAPES[name]
