"""VisualTokens: the input record of all atoms and base policies.

Shapes: B images of equal N and K, T tiles per image, n = N / T tokens per tile, D feature width,
C width of the space in which relevance is measured, M text segments, Dv width of the vision tower,
W words of the instruction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from vllm_autoprune.errors import SelectionError
from vllm_autoprune.ops.similarity import cosines, plain_cosines
from vllm_autoprune.tpdsl.language_prefix import LanguagePrefix
from vllm_autoprune.tpdsl.optional_inputs import (
    Instruction,
    MergerInput,
    NextLayer,
    TowerStates,
    Words,
)

Need = Literal[
    "cls_attention",
    "instruction",
    "encoder",
    "merger_input",
    "tower",
    "next_layer",
    "words",
    "language",
]
"""An optional input of :class:`VisualTokens`, computed only for states that read it.

``next_layer`` is ``VisualTokens.tower.next_layer``; the others are fields of VisualTokens.
"""

RankAt = Literal["merger_out", "merger_in"]
"""Whether tokens are ranked by what they are after the patch merger, or by what enters it."""


TileScope = Literal["per_tile", "global"]
"""Whether tokens are compared within their tile or across all tiles of the image."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Layout of one image's tokens: ``tiles`` grids of ``height`` x ``width`` in raster order."""

    height: int
    width: int
    tiles: int = 1

    @property
    def per_tile(self) -> int:
        """Tokens per tile, n."""
        return self.height * self.width

    @property
    def tokens(self) -> int:
        """Tokens per image, N."""
        return self.per_tile * self.tiles


@dataclass(frozen=True)
class VisualTokens:
    """B images of N visual tokens each, with the optional inputs that a state may read.

    features ``(B, N, D)`` after the projector; cls_attention ``(B, N)`` is the [CLS] row of the
    vision tower's attention, averaged over heads; known_cosine ``(B, N, N)`` is a precomputed
    :attr:`cosine`, which depends on the image alone and takes half the time of a selection; encoder
    ``(B, N, Dv)`` are the tokens before the projector, or before the merger the mean of the patches
    that make a token; merger_input belongs to them where the backbone has a merger; tower, words
    and language are further inputs of some base policies; tile_scope is the scope in which the
    redundancy signal compares tokens. merged ``(B, N, D)`` are the tokens after the merger where
    ``features`` are those before it (:attr:`before_merger`), else None.
    """

    features: Tensor
    grid: Grid
    cls_attention: Tensor | None = None
    instruction: Instruction | None = None
    known_cosine: Tensor | None = None
    tower: TowerStates | None = None
    language: LanguagePrefix | None = None
    tile_scope: TileScope = "per_tile"
    encoder: Tensor | None = None
    words: Words | None = None
    merger_input: MergerInput | None = None
    merged: Tensor | None = None

    def __post_init__(self) -> None:
        if self.features.dim() != 3:
            raise SelectionError(
                f"features must be (B, N, D), got shape {tuple(self.features.shape)}"
            )
        batch, tokens, _ = self.features.shape
        if tokens != self.grid.tokens:
            raise SelectionError(
                f"features hold N = {tokens} tokens but the grid {self.grid.height} x "
                f"{self.grid.width} x {self.grid.tiles} tiles has {self.grid.tokens}"
            )
        inputs = {
            "cls_attention": self.cls_attention,
            "known_cosine": self.known_cosine,
            "encoder": self.encoder,
            "merged": self.merged,
        }
        if self.merger_input is not None:
            inputs["merger_input.norms"] = self.merger_input.norms
        if self.instruction is not None:
            inputs["instruction.patches"] = self.instruction.patches
        if self.tower is not None:
            inputs["tower.patches"] = self.tower.patches
            inputs["tower.keys"] = self.tower.keys
        for name, tensor in inputs.items():
            if tensor is not None and tensor.shape[:2] != (batch, tokens):
                raise SelectionError(
                    f"{name} must start with (B, N) = ({batch}, {tokens}), "
                    f"got {tuple(tensor.shape)}"
                )

    @property
    def batch(self) -> int:
        """Number of images, B."""
        return self.features.shape[0]

    @property
    def count(self) -> int:
        """Tokens per image, N."""
        return self.features.shape[1]

    @property
    def output(self) -> Tensor:
        """``(B, N, D)``: the tokens as the language model reads them, whatever ranks them."""
        return self.features if self.merged is None else self.merged

    @cached_property
    def before_merger(self) -> VisualTokens:
        """The same tokens with the encoder's as ``features``: what a state ranks before the merger.

        Relevance to the instruction and its words stays that of the tokens after the merger: the
        encoder's space is not aligned with text.
        """
        own = self.require_merger_input()
        return replace(
            self,
            features=self.require_encoder(),
            known_cosine=own.known_cosine,
            merged=self.output,
        )

    @cached_property
    def norm(self) -> Tensor:
        """Norm ``(B, N, 1)`` of each token, in the dtype of the features."""
        norm: Tensor = self.features.norm(dim=-1, keepdim=True)
        return norm

    @cached_property
    def unit(self) -> Tensor:
        """Unit vectors ``(B, N, D)`` float32; a zero row stays zero.

        Divided by the norm before the cast to float32, as in the published policies: in half
        precision the order of the two changes which token is picked.
        """
        tiny = torch.finfo(self.features.dtype).tiny
        unit: Tensor = self.features / self.norm.clamp_min(tiny)
        return unit.float()

    @cached_property
    def tile_cosine(self) -> Tensor:
        """Cosines ``(B * T, n, n)`` between the tokens of each tile."""
        if self.grid.tiles == 1:
            return self.cosine
        return cosines(self.by_tile(self.features), self.by_tile(self.norm))

    @cached_property
    def precise_tile_cosine(self) -> Tensor:
        """:attr:`tile_cosine` of features cast to float32 before they are divided by their norm."""
        if self.features.dtype == torch.float32:
            return self.tile_cosine
        return plain_cosines(self.by_tile(self.features).float())

    @property
    def scoped_cosine(self) -> Tensor:
        """:attr:`tile_cosine` or :attr:`cosine`, as ``tile_scope`` says; first axis B or B * T."""
        return self.cosine if self.tile_scope == "global" else self.tile_cosine

    @cached_property
    def cosine(self) -> Tensor:
        """Cosines ``(B, N, N)`` between all tokens of each image."""
        if self.known_cosine is not None:
            return self.known_cosine
        return cosines(self.features, self.norm)

    @property
    def scoped(self) -> VisualTokens:
        """The tokens that are compared with each other: each tile as an image, as ``tile_scope``.

        Features alone, and their cosines.
        """
        if self.grid.tiles == 1 or self.tile_scope == "global":
            return self
        grid, rows = Grid(self.grid.height, self.grid.width), self.by_tile(self.features)
        return VisualTokens(rows, grid, known_cosine=self.tile_cosine)

    def by_tile(self, values: Tensor) -> Tensor:
        """Reshape ``(B, N, ...)`` to ``(B * T, n, ...)``."""
        return values.reshape(self.batch * self.grid.tiles, self.grid.per_tile, *values.shape[2:])

    def by_image(self, values: Tensor) -> Tensor:
        """Reshape ``(B * T, n, ...)`` to ``(B, N, ...)``, the inverse of :meth:`by_tile`."""
        return values.reshape(self.batch, self.count, *values.shape[2:])

    def require_instruction(self) -> Instruction:
        """The instruction; raises :class:`SelectionError` if it is missing."""
        if self.instruction is None:
            raise _missing("the instruction", "instruction")
        return self.instruction

    def require_cls_attention(self) -> Tensor:
        """Attention of [CLS] ``(B, N)``; raises :class:`SelectionError` if it is missing."""
        if self.cls_attention is None:
            raise _missing("the attention of [CLS]", "cls_attention")
        return self.cls_attention

    def require_encoder(self) -> Tensor:
        """Tokens before the projector ``(B, N, Dv)``; :class:`SelectionError` if missing."""
        if self.encoder is None:
            raise _missing("the tokens before the projector", "encoder")
        return self.encoder

    def require_merger_input(self) -> MergerInput:
        """What enters the patch merger; :class:`SelectionError` where the backbone has none."""
        if self.merger_input is None:
            raise SelectionError(
                "this state ranks tokens before the patch merger (rank_at: merger_in), and "
                "VisualTokens.merger_input is None: fill it, or set rank_at to merger_out for a "
                "backbone without a merger"
            )
        return self.merger_input

    def require_words(self) -> Words:
        """The instruction's words; raises :class:`SelectionError` if they are missing."""
        if self.words is None:
            raise _missing("the instruction's words", "words")
        return self.words

    def require_tower(self) -> TowerStates:
        """The vision tower's states; raises :class:`SelectionError` if they are missing."""
        if self.tower is None:
            raise _missing("the vision tower's states", "tower")
        return self.tower

    def require_next_layer(self) -> NextLayer:
        """The tower's next layer; raises :class:`SelectionError` if it is missing."""
        next_layer = self.require_tower().next_layer
        if next_layer is None:
            raise _missing("the vision tower's next layer", "tower.next_layer")
        return next_layer

    def require_language(self) -> LanguagePrefix:
        """The language prefix; raises :class:`SelectionError` if it is missing."""
        if self.language is None:
            raise _missing("the language model's first layers", "language")
        return self.language


def _missing(what: str, field: str) -> SelectionError:
    return SelectionError(
        f"this policy reads {what}, but VisualTokens.{field} is None: fill it "
        "(policy.needs lists what a policy reads)"
    )
