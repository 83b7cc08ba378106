"""Dimensions of backbones, and costs of a prompt: FLOPs of prefill and bytes of KV cache.

The formulas are those of the efficiency table of the AutoPrune paper; :data:`ASSUMPTIONS` lists
what they count and what they leave out.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.hub import explain_unread
from vllm_autoprune.tower import VisionTower

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class _LinearAttention:
    """Layers of linear attention (gated delta net), which cache a state instead of keys and values.

    The last of every ``every`` layers has full attention instead. ``key_width`` and
    ``value_width`` are the widths of the keys and values of all heads, and ``key_head`` is the
    width of one head's keys.
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
    """What the numbers describe: a checkpoint, by its Hub id or folder, and an image size."""
    query_width: int = 0
    """Width of the queries (heads x head width); 0 if it equals ``width``."""
    linear: _LinearAttention | None = None
    """Layers of linear attention; None if every layer has full attention."""
    tower: VisionTower | None = None
    """Vision tower; None if its sizes are not known."""
    geometry: Mapping[str, Any] = field(default_factory=dict)
    """Published settings of configuration and image processor, by which images are counted."""

    @property
    def checkpoint(self) -> str:
        """Folder or Hub id of the checkpoint."""
        return re.split("[:;]", self.source)[0]

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

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Sentences on what the cost on this backbone counts and what it leaves out."""
        linear = () if self.linear is None else (_LINEAR_LAYERS,)
        return (*_FORMULAS, _TOWER if self.tower else _NO_TOWER, _SCOPE, *linear)

    def estimate_cost(
        self, tokens: int, *, text: int = 0, ranking_layers: int = 0
    ) -> Cost:
        """Cost of a prompt of K = ``tokens`` visual tokens and ``text`` text tokens.

        ``ranking_layers`` is the number of layers, with full attention, that run over all N tokens
        before the selection, in addition to the prefill. Raises :class:`ConfigError` if ``tokens``
        is below 1 or ``text`` below 0.
        """
        problems = [
            Problem(
                flag, f"{value} is not a number of tokens", f"give {minimum} or more"
            )
            for flag, value, minimum in (("--tokens", tokens, 1), ("--text", text, 0))
            if value < minimum
        ]
        if problems:
            raise ConfigError(f"cost on {self.name}", problems)
        d = self.width
        m = self.feed_forward
        k = self.kv_width
        q = self.query_width or self.width

        def count_full(n: int) -> int:
            """Multiply-accumulates of a layer of full attention on ``n`` tokens."""
            return n * d * (2 * q + 2 * k) + 2 * n * n * q + 3 * n * d * m

        n = tokens + text
        full = self.layers // (self.linear.every if self.linear else 1)
        macs = full * count_full(n) + ranking_layers * count_full(self.tokens + text)
        if self.linear is not None:
            a = self.linear.key_width
            v = self.linear.value_width
            linear = (
                n * d * (2 * a + 3 * v)
                + 3 * n * v * self.linear.key_head
                + 3 * n * d * m
            )
            macs += (self.layers - full) * linear
        kv_bytes = full * n * 2 * k * 2  # keys and values of 16 bits
        return Cost(tokens=tokens, text=text, flops=2 * macs, kv_bytes=kv_bytes)

    @classmethod
    def of_checkpoint(cls, name: str, config: PretrainedConfig) -> BackboneShape:
        """Shape of a checkpoint: its own language model, with the visual tokens of its family.

        The grid is that of the family's first listed backbone, because other families than
        LLaVA-1.5 and LLaVA-NeXT take images of any size or have one grid in every checkpoint. For
        these two it follows from the vision tower. Raises LookupError for a family that is not
        listed.
        """
        shapes = {shape.family: shape for shape in reversed(BACKBONE_SHAPES.values())}
        like = shapes.get(config.model_type)
        if like is None:
            raise LookupError(f"model_type {config.model_type!r} is not served pruned")
        text = _find_language_config(config)
        heads = text.num_attention_heads
        width = text.hidden_size
        head = getattr(text, "head_dim", None) or width // heads
        feed_forward = text.intermediate_size
        if experts := getattr(text, "num_experts_per_tok", None):
            # A token passes through its routed experts, and through the shared ones.
            routed = experts + getattr(text, "n_shared_experts", 0)
            feed_forward = routed * text.moe_intermediate_size
            feed_forward += getattr(text, "shared_expert_intermediate_size", 0)
        elif experts := getattr(text, "top_k_experts", None):
            # Gemma 4 adds the experts to a dense feed-forward.
            feed_forward += experts * text.moe_intermediate_size
        shape = replace(
            like,
            name=name,
            layers=text.num_hidden_layers,
            width=width,
            feed_forward=feed_forward,
            kv_width=(getattr(text, "num_key_value_heads", None) or heads) * head,
            query_width=heads * head,
            source=f"{name}; its config.json, images as of {like.name}",
            tower=None,
            geometry={},
        )
        if like.has_cls:
            side = config.vision_config.image_size // config.vision_config.patch_size
            shape = replace(shape, grid_height=side, grid_width=side)
        if like.linear is not None:
            linear = replace(
                like.linear,
                key_width=text.linear_num_key_heads * text.linear_key_head_dim,
                value_width=text.linear_num_value_heads * text.linear_value_head_dim,
                key_head=text.linear_key_head_dim,
            )
            shape = replace(shape, linear=linear)
        return shape


def _read_shapes() -> dict[str, BackboneShape]:
    """Read ``backbones.toml``; ``like`` names the backbone that has the fields a row lacks."""
    table = tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    )

    def fields_of(name: str) -> dict[str, Any]:
        fields = dict(table[name])
        return (fields_of(base) if (base := fields.pop("like", None)) else {}) | fields

    shapes = {}
    for name in table:
        fields = fields_of(name)
        linear = fields.pop("linear", None)
        attention = _LinearAttention(**linear) if linear else None
        sizes = fields.pop("tower")
        tower = VisionTower(**sizes) if sizes else None
        shapes[name] = BackboneShape(name=name, linear=attention, tower=tower, **fields)
    return shapes


BACKBONE_SHAPES = _read_shapes()
"""Name -> shape, of at least one backbone of every family that is served pruned."""


def find_backbone(
    name: str, check: Callable[[PretrainedConfig], object] | None = None
) -> BackboneShape:
    """Find a listed backbone by name or Hub id, or read the shape of another checkpoint.

    For another checkpoint, ``name`` is its folder or its id on the Hub or in the Hub's cache, and
    ``check`` is called with its config before the shape is read. Raises :class:`ConfigError`,
    which lists the known names.
    """
    for shape in BACKBONE_SHAPES.values():
        if name in (shape.name, shape.checkpoint):
            return shape
    names = ", ".join(BACKBONE_SHAPES)
    near = difflib.get_close_matches(
        name.lower(), list(BACKBONE_SHAPES), n=1, cutoff=0.75
    )
    what = "not a known backbone"
    fix = f"did you mean {near[0]!r}? ({names})" if near else f"use one of {names}"
    if "/" in name or Path(name).is_dir():
        config = read_config(name)
        if check is not None:
            check(config)
        try:
            return BackboneShape.of_checkpoint(name, config)
        except (LookupError, AttributeError, TypeError) as error:
            what = f"config.json is not that of a served family ({str(error)[:150]})"
    raise ConfigError.of(name, what, fix, subject="backbone")


def add_tower(shape: BackboneShape) -> BackboneShape:
    """Return ``shape`` with a vision tower, whose weights are counted for unlisted checkpoints.

    ``shape`` is returned unchanged if transformers cannot build the model from its config.json.
    """
    if shape.tower or shape.name in BACKBONE_SHAPES:
        return shape
    listed = [row for row in BACKBONE_SHAPES.values() if row.family == shape.family]
    try:
        tower = VisionTower.of_config(read_config(shape.name), listed[0].tower)
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError):
        return shape
    return replace(shape, tower=tower)


def find_config_class(kind: object) -> type[PretrainedConfig] | None:
    """The class that transformers has for a ``model_type``; None if it has none.

    vLLM registers classes of its own in their place once it has read such a checkpoint, and these
    may count layers differently (Cosmos 3 Edge).
    """
    from transformers.models.auto.configuration_auto import (
        CONFIG_MAPPING,
        CONFIG_MAPPING_NAMES,
    )

    unregistered = type(CONFIG_MAPPING)(CONFIG_MAPPING_NAMES)
    return unregistered[kind] if kind in CONFIG_MAPPING_NAMES else None


def read_config(name: str) -> PretrainedConfig:
    """Read the config.json of a folder, or of a checkpoint on the Hub or in its cache.

    No code of the checkpoint is run: if transformers does not know its ``model_type``, the fields
    of the file become attributes unchanged. Raises :class:`ConfigError` if it cannot be read.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import PretrainedConfig

    def make(fields: dict[str, Any]) -> PretrainedConfig:
        if config := find_config_class(fields.get("model_type")):
            return config.from_dict(fields)
        nested = {
            key: make(part)
            for key, part in fields.items()
            if key.endswith("_config") and isinstance(part, dict)
        }
        return PretrainedConfig.from_dict({**fields, **nested})

    try:
        if not (fields := PretrainedConfig.get_config_dict(name)[0]):
            raise ValueError("it is empty, or there is none")
        return make(fields)
    except (
        OSError,
        ValueError,
        AttributeError,
        TypeError,
        StrictDataclassError,
    ) as error:
        what = "has no config.json of a model, here or on the Hub"
        fix = "give a folder with one, or the id of a checkpoint that can be fetched"
        problem = explain_unread(name, error, what, fix)
        raise ConfigError("checkpoint", [problem]) from None


def _find_language_config(config: PretrainedConfig) -> PretrainedConfig:
    """Configuration of the language model, which families nest under different names."""
    for name in ("thinker_config", "text_config", "llm_config", "language_config"):
        if part := vars(config).get(name):
            return _find_language_config(part)
    return config


# Cost of an image and of a prompt.


_FORMULAS = (
    "FLOPs = sum over layers of 2 x (n d (2 q + 2 k) + 2 n^2 q + 3 n d m): q, k, v and o "
    "projections, full n x n attention (no causal halving), three gated feed-forward matrices; "
    "a multiply-accumulate is 2 FLOPs.",
    "KV cache = sum over layers of n x 2 (key, value) x k x 2 bytes (16-bit); MiB = 2^20 bytes.",
    "n: tokens of one prompt in that layer; d: width, m: feed-forward width, k: key-value width, "
    "q: query width, which is d unless said otherwise.",
)
_SCOPE = (
    "Prefill only: no embedding or output head. Of the selection, the layers of the language model "
    "that a policy runs over all tokens to rank them; nothing else."
)
ASSUMPTIONS = (*_FORMULAS, "No vision tower or projector.", _SCOPE)
"""What the cost of a language model counts and what it leaves out."""

_TOWER = (
    "Vision tower, whatever is pruned: 2 x (p w + 2 layers p^2 d + N j), of p patches an image or "
    "tile; w: entries of the tower's matrices, d: its width, j: entries of projector or mergers. "
    "Layers with windows attend within these."
)
_NO_TOWER = (
    "No vision tower or projector, because the sizes of this one are not known. It costs the same "
    "whatever is pruned, so the true ratios are smaller."
)

_LINEAR_LAYERS = (
    "A layer of linear attention (gated delta net) has 2 x (n d (2 a + 3 v) + 3 n v h + 3 n d m): "
    "q, k, v, gate and output projections, and three products with a state of v x h a token, where "
    "a and v are the widths of keys and values and h that of one key head. Its state does not grow "
    "with the prompt and is not counted as KV cache. Gates of full attention are left out."
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one prompt."""

    tokens: int
    """Visual tokens."""
    text: int
    """Text tokens."""
    flops: int
    """Floating-point operations of prefill."""
    kv_bytes: int
    """Bytes of KV cache."""

    @property
    def teraflops(self) -> float:
        """FLOPs in units of 10^12."""
        return self.flops / 10**12

    @property
    def kv_mib(self) -> float:
        """KV cache in MiB."""
        return self.kv_bytes / 2**20
