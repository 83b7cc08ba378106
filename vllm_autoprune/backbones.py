"""Dimensions of the backbones that a state can be transferred between."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Literal

from vllm_autoprune.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Layers of linear attention (gated delta net), which keep one state and no keys and values.

    One layer of ``every`` has full attention, the last of each group. Keys and values of all heads
    are ``key_width`` and ``value_width`` wide, those of one head ``key_head``.
    """

    every: int
    key_width: int
    value_width: int
    key_head: int


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
    merger: bool
    """Whether a patch merger makes a visual token of several patches."""
    source: str
    """Checkpoint and image size that these numbers are taken from."""
    query_width: int = 0
    """Width of the queries (heads x head width), where it is not ``width``."""
    linear: LinearAttention | None = None
    """Its layers of linear attention; None where every layer has full attention."""

    @property
    def queries(self) -> int:
        """Width of the queries."""
        return self.query_width or self.width

    def linear_attention(self, layer: int) -> LinearAttention | None:
        """Linear attention of layer number ``layer``, counted from 0; None where it is full."""
        if self.linear is None or (layer + 1) % self.linear.every == 0:
            return None
        return self.linear

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
    merger=False,
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
    merger=False,
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
    merger=False,
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
    merger=True,
    source="Qwen/Qwen2.5-VL-7B-Instruct; 1008 x 1008 pixels, 28 pixels a merged token",
)

ONEVISION_7B = replace(
    QWEN_7B,
    name="llava-onevision-7b",
    family="llava_onevision",
    grid_height=27,
    grid_width=27,
    tiles=5,
    tower_rows=True,
    source="llava-hf/llava-onevision-qwen2-7b-ov-hf; 768 x 768 pixels: one base view and 2 x 2 "
    "crops, no newlines",
)

QWEN2_7B = replace(
    QWEN_7B,
    name="qwen2-vl-7b",
    family="qwen2_vl",
    source="Qwen/Qwen2-VL-7B-Instruct; 1008 x 1008 pixels, 28 pixels a merged token",
)

QWEN3_8B = replace(
    QWEN_7B,
    name="qwen3-vl-8b",
    family="qwen3_vl",
    layers=36,
    width=4096,
    feed_forward=12288,
    kv_width=8 * 128,
    grid_height=32,
    grid_width=32,
    source="Qwen/Qwen3-VL-8B-Instruct; 1024 x 1024 pixels, 32 pixels a merged token",
)

QWEN3_30B_A3B = replace(
    QWEN3_8B,
    name="qwen3-vl-30b-a3b",
    family="qwen3_vl_moe",
    layers=48,
    width=2048,
    feed_forward=8 * 768,
    kv_width=4 * 128,
    query_width=32 * 128,
    source="Qwen/Qwen3-VL-30B-A3B-Instruct; 1024 x 1024 pixels, 32 pixels a merged token; the 8 "
    "experts of a token",
)

QWEN3_5_9B = replace(
    QWEN3_8B,
    name="qwen3.5-9b",
    family="qwen3_5",
    layers=32,
    kv_width=4 * 256,
    query_width=16 * 256,
    linear=LinearAttention(every=4, key_width=16 * 128, value_width=32 * 128, key_head=128),
    source="Qwen/Qwen3.5-9B; 1024 x 1024 pixels, 32 pixels a merged token",
)

QWEN3_5_MOE_35B = replace(
    QWEN3_5_9B,
    name="qwen3.5-35b-a3b",
    family="qwen3_5_moe",
    layers=40,
    width=2048,
    feed_forward=9 * 512,
    kv_width=2 * 256,
    source="Qwen/Qwen3.5-35B-A3B; 1024 x 1024 pixels, 32 pixels a merged token; the 8 experts of a "
    "token and the shared one",
)

GLM4_1V_9B = replace(
    QWEN_7B,
    name="glm-4.1v-9b",
    family="glm4v",
    layers=40,
    width=4096,
    feed_forward=13696,
    kv_width=2 * 128,
    source="zai-org/GLM-4.1V-9B-Thinking; 1008 x 1008 pixels, 28 pixels a merged token",
)

GLM4_5V = replace(
    GLM4_1V_9B,
    name="glm-4.5v",
    family="glm4v_moe",
    layers=46,
    feed_forward=9 * 1408,
    kv_width=8 * 128,
    query_width=96 * 128,
    source="zai-org/GLM-4.5V; 1008 x 1008 pixels, 28 pixels a merged token; the 8 experts of a "
    "token and the shared one, in the first layer too",
)

INTERNVL3_8B = replace(
    QWEN_7B,
    name="internvl3-8b",
    family="internvl",
    grid_height=16,
    grid_width=16,
    tiles=5,
    source="OpenGVLab/InternVL3-8B-hf; 896 x 896 pixels: 2 x 2 tiles and a thumbnail",
)

IDEFICS3_8B = replace(
    QWEN_7B,
    name="idefics3-8b",
    family="idefics3",
    layers=32,
    width=4096,
    feed_forward=14336,
    kv_width=8 * 128,
    grid_height=13,
    grid_width=13,
    tiles=17,
    source="HuggingFaceM4/Idefics3-8B-Llama3; a square image: 4 x 4 tiles and the whole image, "
    "text between them not counted",
)

SMOLVLM2_2B = replace(
    IDEFICS3_8B,
    name="smolvlm2-2.2b",
    family="smolvlm",
    layers=24,
    width=2048,
    feed_forward=8192,
    kv_width=32 * 64,
    grid_height=9,
    grid_width=9,
    source="HuggingFaceTB/SmolVLM2-2.2B-Instruct; a square image: 4 x 4 tiles of 384 x 384 pixels "
    "and the whole image, text between them not counted",
)

SMOLVLM2_500M = replace(
    SMOLVLM2_2B,
    name="smolvlm2-500m",
    layers=32,
    width=960,
    feed_forward=2560,
    kv_width=5 * 64,
    grid_height=8,
    grid_width=8,
    source="HuggingFaceTB/SmolVLM2-500M-Video-Instruct; a square image: 4 x 4 tiles of 512 x 512 "
    "pixels and the whole image, text between them not counted",
)

GEMMA3_4B = replace(
    QWEN_7B,
    name="gemma-3-4b",
    family="gemma3",
    layers=34,
    width=2560,
    feed_forward=10240,
    kv_width=4 * 256,
    query_width=8 * 256,
    grid_height=16,
    grid_width=16,
    source="google/gemma-3-4b-it; 896 x 896 pixels, no crops; sliding windows counted as full "
    "attention",
)

BACKBONE_SHAPES: dict[str, BackboneShape] = {
    shape.name: shape
    for shape in (
        LLAVA_7B,
        LLAVA_13B,
        LLAVA_NEXT_7B,
        ONEVISION_7B,
        QWEN2_7B,
        QWEN_7B,
        QWEN3_8B,
        QWEN3_30B_A3B,
        QWEN3_5_9B,
        QWEN3_5_MOE_35B,
        GLM4_1V_9B,
        GLM4_5V,
        INTERNVL3_8B,
        IDEFICS3_8B,
        SMOLVLM2_2B,
        SMOLVLM2_500M,
        GEMMA3_4B,
    )
}
"""One shape or more of every family that is served pruned."""


def find_backbone(name: str) -> BackboneShape:
    """Look up a backbone by name; :class:`ConfigError` lists the known names."""
    if name not in BACKBONE_SHAPES:
        known = ", ".join(BACKBONE_SHAPES)
        near = difflib.get_close_matches(name.lower(), list(BACKBONE_SHAPES), n=1, cutoff=0.75)
        fix = f"did you mean {near[0]!r}? (" if near else "use one of "
        fix += known + (")" if near else "")
        raise ConfigError("backbone", [Problem(name, "not a known backbone", fix)])
    return BACKBONE_SHAPES[name]
