"""Dimensions of the backbones that a state can be transferred between."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_autoprune.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class _LinearAttention:
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
    """Width of the queries (heads x head width); 0: it is ``width``."""
    linear: _LinearAttention | None = None
    """Its layers of linear attention; None where every layer has full attention."""

    def linear_attention(self, layer: int) -> _LinearAttention | None:
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


def _read_shapes() -> dict[str, BackboneShape]:
    """The table ``backbones.toml``, where ``like`` names the backbone that has the other fields."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

    def fields_of(name: str) -> dict[str, Any]:
        fields = dict(table[name])
        return (fields_of(base) if (base := fields.pop("like", None)) else {}) | fields

    shapes = {}
    for name in table:
        fields = fields_of(name)
        linear = fields.pop("linear", None)
        attention = _LinearAttention(**linear) if linear else None
        shapes[name] = BackboneShape(name=name, linear=attention, **fields)
    return shapes


BACKBONE_SHAPES = _read_shapes()
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
