"""VisualTokens, the input record of all atoms and base policies, and its split into tiles.

Shapes: B images of equal N and K, T tiles per image, n = N / T tokens per tile, D feature width,
C width of the space in which relevance is measured, M text segments, Dv width of the vision tower,
W words of the instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, TypeVar

import torch
from torch import Tensor

from vllm_autoprune.errors import SelectionError
from vllm_autoprune.ops.rowwise import mask_from_indices, upload
from vllm_autoprune.ops.similarity import cosines, cosines_with, plain_cosines
from vllm_autoprune.tpdsl.prefix import LanguagePrefix


@dataclass(frozen=True)
class Instruction:
    """Embeddings of tokens and instruction in the space where relevance is measured."""

    patches: Tensor
    """``(B, N, C)``: one row per token."""
    text: Tensor
    """``(B, M, C)``: one row per text segment."""
    segments: Tensor
    """``(B, M)`` bool: false for padding."""
    sign: int
    """Sign with which the cosine means relevance: -1 for OpenAI's CLIP as LLaVA uses it, +1 for a
    language model's embedding space."""

    @cached_property
    def cosines(self) -> Tensor:
        """Unsigned cosines ``(B, N, M)`` of each token with each segment.

        Computed in float32, as the published policies do with CLIP's projections.
        """
        return cosines_with(self.patches, self.text)

    def relevance(
        self, reduce: Literal["mean", "max"] = "mean", sign: int | None = None
    ) -> Tensor:
        """Cosine of each token with the instruction, reduced over segments, times ``sign``.

        ``sign`` is by default that of the space. Returns ``(B, N)`` float32; zeros for an image
        whose instruction has no segment.
        """
        cosines = (self.sign if sign is None else sign) * self.cosines
        used = self.segments[:, None, :]
        if reduce == "max":
            best = cosines.masked_fill(~used, -torch.inf).amax(dim=-1)
            return torch.where(used.any(dim=-1), best, torch.zeros_like(best))
        total = cosines.masked_fill(~used, 0.0).sum(dim=-1)
        return total / used.sum(dim=-1).clamp_min(1)


@dataclass(frozen=True)
class Words:
    """Input embeddings of the instruction's words in the language model."""

    embeddings: Tensor
    """``(B, W, D)``: one row per token of a word."""
    used: Tensor
    """``(B, W)`` bool: false for padding."""


@dataclass(frozen=True)
class NextLayer:
    """Attention of the layer after the one that the projector reads, computed as a single head."""

    attention: Tensor
    """``(B, N)``: the [CLS] row of softmax(q k^T / sqrt(Dv)) over [CLS] and the patches of a tile,
    without the entry of [CLS] itself; for towers without [CLS], the mean over all queries."""
    keys: Tensor
    """``(B, N, Dv)``: the keys of all heads, concatenated."""


@dataclass(frozen=True)
class TowerStates:
    """Output of the vision-tower layer that the projector reads."""

    patches: Tensor
    """``(B, N, Dv)``: the output at each token."""
    keys: Tensor
    """``(B, N, dk)``: the attention keys of that layer, averaged over heads."""
    project: Callable[[Tensor], Tensor]
    """The model's projector, from rows ``(..., Dv)`` to ``(..., D)``."""
    cls: Tensor | None = None
    """``(B, T, Dv)``: the output at [CLS]; None if the tower has none."""
    next_layer: NextLayer | None = None
    """Attention of the layer after it; None if no policy reads that."""

    def projected(self, rows: Tensor) -> Tensor:
        """Project rows ``(R, m, Dv)`` to ``(R, m, D)``.

        Tiles are projected one at a time, so that results are bit-identical alone and in a batch.
        """
        return torch.stack([self.project(part) for part in rows])


@dataclass(frozen=True)
class MergerInput:
    """Inputs of the patch merger, which only some backbones have."""

    norms: Tensor
    """``(B, N, 2)`` float32: L1 norm and Euclidean norm of each token, as means over its patches.
    """
    known_cosine: Callable[[], Tensor] | None = None
    """Returns the cosines ``(B, N, N)`` between the encoder's tokens from a cache, if there is one.
    """


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
"""Whether tokens are ranked by the output of the patch merger or by its input."""


Positions = Literal["true", "spread", "packed"]

POSITIONS: Mapping[Positions, str] = {
    "true": "where they stood in the whole image",
    "spread": "evenly over the span of the whole image",
    "packed": "one after the other, as if the image had been small",
}
"""Positions of the kept tokens in the language model."""

Shares = Literal["equal", "free"]
"""Whether the base policy keeps K / T tokens of each of an image's T tiles, or K tokens of all."""

TileScope = Literal["per_tile", "global"]
"""Whether tokens are compared within their tile or across all tiles of the image."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Layout of one image's tokens: T grids of ``height`` x ``width`` places in raster order."""

    height: int
    """Rows of a tile."""
    width: int
    """Places per row."""
    tiles: int = 1
    """T, the number of tiles."""
    anchors: bytes = b""
    """Result of :meth:`vllm_autoprune.tpdsl.cells.Cells.find_anchors` for one tile, as bytes, if
    only some cells are tokens; empty if all are."""
    video: bool = False
    """Whether the tiles are the frames of a video in time order."""
    remaining: int = 0
    """Tokens of the only tile that a vision tower has not dropped, whose places
    (:attr:`VisualTokens.places`) only the device knows; 0 if none were dropped."""

    @property
    def per_tile(self) -> int:
        """Tokens per tile, n."""
        return self.remaining or self.encoded_per_tile

    @property
    def encoded_per_tile(self) -> int:
        """Cells per tile that a vision tower starts with."""
        return (
            len(_read_anchors(self.anchors)[0])
            if self.anchors
            else self.height * self.width
        )

    @property
    def tokens(self) -> int:
        """Tokens per image, N."""
        return self.per_tile * self.tiles

    def at_encoded(self, values: Tensor) -> Tensor:
        """Select the values ``(..., n)`` of the cells that a tower starts with.

        Shape ``(..., height * width) -> (..., n)``.
        """
        if not self.anchors:
            return values
        return values.index_select(
            -1, upload(_read_anchors(self.anchors)[0], values.device)
        )

    def at_places(self, values: Tensor, dim: int = -1) -> Tensor:
        """Inverse of :meth:`at_encoded` in one dimension; empty places have their anchor's."""
        if not self.anchors:
            return values
        return values.index_select(
            dim, upload(_read_anchors(self.anchors)[1], values.device)
        )


@lru_cache(maxsize=256)
def _read_anchors(anchors: bytes) -> tuple[Tensor, Tensor]:
    """The place ``(n,)`` of each token, and the token ``(height * width,)`` at each place."""
    anchor = torch.frombuffer(bytearray(anchors), dtype=torch.int32).long()
    is_token = anchor == torch.arange(len(anchor))
    return is_token.nonzero()[:, 0], (is_token.cumsum(0) - 1)[anchor]


@dataclass(frozen=True)
class VisualTokens:
    """B images of N visual tokens each, with the optional inputs that a state may read."""

    features: Tensor
    """``(B, N, D)`` after the projector."""
    grid: Grid
    """Layout of the N tokens of each image."""
    cls_attention: Tensor | None = None
    """``(B, N)``: the [CLS] row of the vision tower's attention, averaged over heads."""
    instruction: Instruction | None = None
    """What the relevance to the question is measured with."""
    known_cosine: Callable[[], Tensor] | None = None
    """Returns :attr:`cosine` from a cache, if there is one: it depends on the image alone, and
    takes half the time of a selection. Only code that reads cosines calls it; they take 4 N^2
    bytes."""
    tower: TowerStates | None = None
    """States of the vision tower, which some base policies read."""
    language: LanguagePrefix | None = None
    """First layers of the language model, which some base policies read."""
    tile_scope: TileScope = "per_tile"
    """Scope in which the redundancy signal compares tokens."""
    encoder: Tensor | None = None
    """``(B, N, Dv)``: the tokens before the projector. Before a merger, the mean of the patches
    that make a token."""
    words: Words | None = None
    """The instruction's words, which some base policies read."""
    merger_input: MergerInput | None = None
    """Further inputs of the merger, if the backbone has one."""
    merged: Tensor | None = None
    """``(B, N, D)`` after the merger, if ``features`` are the tokens before it
    (:attr:`before_merger`)."""
    places: Tensor | None = None
    """``(B, N)`` ascending: the index of each token among the cells that the vision tower started
    with, if it has dropped some (:attr:`Grid.remaining`)."""

    def __post_init__(self) -> None:
        if self.features.dim() != 3 or self.features.shape[1] != self.grid.tokens:
            grid = f"{self.grid.height} x {self.grid.width} x {self.grid.tiles} tiles"
            raise SelectionError.of(
                "VisualTokens.features",
                f"has shape {tuple(self.features.shape)}",
                f"give (B, N, D) with N = {self.grid.tokens} of the grid {grid}",
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
        """``(B, N, D)``: the tokens as the language model reads them, however they are ranked."""
        return self.features if self.merged is None else self.merged

    @cached_property
    def before_merger(self) -> VisualTokens:
        """The same tokens with those of the encoder as ``features``, for a state that ranks those.

        Relevance to the instruction and its words stays that of the tokens after the merger,
        because the encoder's space is not aligned with text.
        """
        known_cosine = self.require_merger_input().known_cosine
        return replace(
            self,
            features=self.require_encoder(),
            known_cosine=known_cosine,
            merged=self.output,
        )

    @cached_property
    def as_one_tile(self) -> VisualTokens:
        """The same tokens as one grid, tile below tile, so that a policy keeps K of all of them."""
        if self.grid.tiles == 1:
            return self
        tower = self.tower
        if tower is not None and tower.cls is not None:
            tower = replace(tower, cls=tower.cls.mean(dim=1, keepdim=True))
        grid = Grid(self.grid.height * self.grid.tiles, self.grid.width)
        return replace(self, grid=grid, tower=tower, known_cosine=lambda: self.cosine)

    @cached_property
    def norm(self) -> Tensor:
        """Norm ``(B, N, 1)`` of each token, in the dtype of the features."""
        norm: Tensor = self.features.norm(dim=-1, keepdim=True)
        return norm

    @cached_property
    def tile_cosine(self) -> Tensor:
        """Cosines ``(B * T, n, n)`` between the tokens of each tile."""
        if self.grid.tiles == 1:
            return self.cosine
        return cosines(
            self.by_tile(self.features), self.by_tile(self.norm), self.grid.tiles
        )

    @cached_property
    def precise_tile_cosine(self) -> Tensor:
        """:attr:`tile_cosine` from features cast to float32 before division by their norm."""
        if self.features.dtype == torch.float32:
            return self.tile_cosine
        return plain_cosines(self.by_tile(self.features).float(), self.grid.tiles)

    @cached_property
    def cosine(self) -> Tensor:
        """Cosines ``(B, N, N)`` between all tokens of each image."""
        if self.known_cosine is not None:
            return self.known_cosine()
        return cosines(self.features, self.norm)

    def at_tokens(self, values: Tensor) -> Tensor:
        """Select the values of the tokens from those of all places of a tile.

        Shape ``(R, height * width) -> (R, n)``, where R is B * T, or 1 for values that all tiles
        share. If a tower has dropped cells, which differ between images, 1 becomes B.
        """
        values = self.grid.at_encoded(values)
        if self.places is None:
            return values
        return values.expand(self.batch, -1).gather(1, self.places)

    def at_places(self, values: Tensor) -> Tensor:
        """Values ``(R, places, places)`` of all pairs of places from those ``(R, n, n)`` of tokens.

        An empty place gets the values of its anchor; one that a tower has emptied those of the last
        token before it, or else of the first.
        """
        if self.places is not None:
            count = self.grid.encoded_per_tile
            filled = mask_from_indices(self.places, count).cumsum(1) - 1
            index = filled.clamp_min(0)
            values = values.gather(2, index[:, None].expand(-1, values.shape[1], -1))
            values = values.gather(1, index[:, :, None].expand(-1, -1, count))
        return self.grid.at_places(self.grid.at_places(values), 1)

    @property
    def centre_distance(self) -> Tensor:
        """Distance ``(R, N)`` of each token from its tile's centre; corners are at (+-1, +-1).

        R is as of :meth:`at_tokens`. As in the released code, the first and the last row and column
        lie on the border.
        """
        device = self.features.device
        y, x = (
            torch.linspace(-1, 1, side, device=device)
            if side > 1
            else torch.zeros(1, device=device)
            for side in (self.grid.height, self.grid.width)
        )
        distance = torch.hypot(y[:, None], x[None, :]).flatten()
        return self.at_tokens(distance[None]).repeat(1, self.grid.tiles)

    def by_tile(self, values: Tensor) -> Tensor:
        """Reshape ``(B, N, ...)`` to ``(B * T, n, ...)``."""
        return values.reshape(
            self.batch * self.grid.tiles, self.grid.per_tile, *values.shape[2:]
        )

    def by_image(self, values: Tensor) -> Tensor:
        """Reshape ``(B * T, n, ...)`` to ``(B, N, ...)``, the inverse of :meth:`by_tile`."""
        return values.reshape(self.batch, self.count, *values.shape[2:])

    def map_videos(self, measure: Callable[[Tensor], Tensor]) -> Tensor:
        """Values ``(B, N)`` by a function that maps one video ``(T, n, D)`` float32 to ``(T, n)``.

        If the tokens are no video, each tile counts as a video of one frame.
        """
        frames = self.grid.tiles if self.grid.video else 1
        videos = self.features.reshape(
            -1, frames, self.grid.per_tile, self.features.shape[2]
        )
        return torch.stack([measure(video.float()) for video in videos]).reshape(
            self.batch, -1
        )

    def join_tiles(
        self, picks: Tensor, shares: Sequence[int], first_tile: int = 0
    ) -> Tensor:
        """Picks ``(B * T, max share)`` within tiles as picks ``(B, K)`` within images.

        This is for nested selections, whose first k picks do not depend on how many follow: a tile
        with a smaller share drops its last pick. Picks of the tiles are interleaved by rank, so
        that earlier picks still mean higher confidence. The larger shares go to the tiles from
        ``first_tile`` on.
        """
        tiles = self.grid.tiles
        size = self.grid.per_tile
        if tiles == 1:
            return picks
        offset = torch.arange(0, self.count, size, device=picks.device)[:, None]
        by_tile = picks.reshape(self.batch, tiles, -1) + offset
        if first_tile:
            by_tile = by_tile.roll(-first_tile, dims=1)
        flat = by_tile.transpose(1, 2).reshape(self.batch, -1)
        return flat[:, : sum(shares)]

    def require_instruction(self) -> Instruction:
        """The instruction; raises :class:`SelectionError` if it is missing."""
        return _present(self.instruction, "the instruction", "instruction")

    def require_cls_attention(self) -> Tensor:
        """Attention of [CLS] ``(B, N)``; raises :class:`SelectionError` if it is missing."""
        return _present(self.cls_attention, "the attention of [CLS]", "cls_attention")

    def require_encoder(self) -> Tensor:
        """Tokens before the projector ``(B, N, Dv)``; :class:`SelectionError` if missing."""
        return _present(self.encoder, "the tokens before the projector", "encoder")

    def require_merger_input(self) -> MergerInput:
        """What enters the patch merger; :class:`SelectionError` where the backbone has none."""
        if self.merger_input is None:
            raise SelectionError.of(
                "VisualTokens.merger_input",
                "is None, and this state ranks tokens before the patch merger (rank_at: merger_in)",
                "fill it, or set rank_at to merger_out for a backbone without a merger",
            )
        return self.merger_input

    def require_words(self) -> Words:
        """The instruction's words; raises :class:`SelectionError` if they are missing."""
        return _present(self.words, "the instruction's words", "words")

    def require_tower(self) -> TowerStates:
        """The vision tower's states; raises :class:`SelectionError` if they are missing."""
        return _present(self.tower, "the vision tower's states", "tower")

    def require_next_layer(self) -> NextLayer:
        """The tower's next layer; raises :class:`SelectionError` if it is missing."""
        what = "the vision tower's next layer"
        return _present(self.require_tower().next_layer, what, "tower.next_layer")

    def require_language(self) -> LanguagePrefix:
        """The language prefix; raises :class:`SelectionError` if it is missing."""
        return _present(self.language, "the language model's first layers", "language")


T = TypeVar("T")


def _present(value: T | None, what: str, field: str) -> T:
    if value is None:
        raise SelectionError.of(
            f"VisualTokens.{field}",
            f"is None, and this policy reads {what}",
            "fill it (policy.needs lists what a policy reads)",
        )
    return value


def split_over_tiles(budget: int, tiles: int) -> tuple[int, ...]:
    """Share of K per tile: ``K // T``, and one more for the first ``K % T`` tiles."""
    share, remainder = divmod(budget, tiles)
    return tuple(share + (tile < remainder) for tile in range(tiles))


def split_over_parts(
    budget: int, sizes: Sequence[int], tiles: Sequence[int]
) -> tuple[int, ...]:
    """Split K over parts of ``sizes`` tokens: K / T for each of their ``tiles``.

    The remainder goes to the first parts. Tokens that a part has no room for go to the next part
    with room. If K is at least the number of tokens, every part keeps all of its tokens.
    """
    shares = split_over_tiles(budget, sum(tiles))
    budgets = [0] * len(sizes)
    done = 0
    for part, size in enumerate(sizes):
        budgets[part] = min(sum(shares[done : done + tiles[part]]), size)
        done += tiles[part]
    surplus = min(budget, sum(sizes)) - sum(budgets)
    for part, size in enumerate(sizes):
        more = min(surplus, size - budgets[part])
        budgets[part] += more
        surplus -= more
    return tuple(budgets)


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Adjacent tiles with an equal share of the budget."""

    start: int
    """Index of the first tile."""
    tiles: int
    """Number of tiles."""
    share: int
    """Tokens that are kept in each tile."""

    @classmethod
    def split(cls, tokens: VisualTokens, budget: int) -> tuple[TileGroup, ...]:
        """Group tiles by their share of the budget, larger share first, omitting a share of 0.

        This is for selections that are not nested: the picks at k are not the first k picks at k +
        1, so each of the at most two shares has to be computed separately.
        """
        shares = split_over_tiles(budget, tokens.grid.tiles)
        groups = []
        start = 0
        for share in sorted(set(shares), reverse=True):
            count = shares.count(share)
            if share:
                groups.append(cls(start, count, share))
            start += count
        return tuple(groups)

    @staticmethod
    def join(
        parts: Sequence[Tensor], groups: Sequence[TileGroup], tokens: VisualTokens
    ) -> Tensor:
        """Join one ``(B * tiles, p, ...)`` per group as ``(B, sum, ...)``, interleaved by rank.

        The first group has as many rows per tile as the second, or one more.
        """
        spread = [
            part.reshape(tokens.batch, group.tiles, *part.shape[1:]).transpose(1, 2)
            for part, group in zip(parts, groups, strict=True)
        ]
        if len(spread) == 1:
            return spread[0].flatten(1, 2)
        common = spread[1].shape[1]
        both = torch.cat([spread[0][:, :common], spread[1]], dim=2).flatten(1, 2)
        return torch.cat([both, spread[0][:, common:].flatten(1, 2)], dim=1)

    def of(self, values: Tensor, tokens: VisualTokens) -> Tensor:
        """Values ``(B, N, ...)`` of the group's tokens, as ``(B * tiles, n, ...)``."""
        shape = (
            tokens.batch,
            tokens.grid.tiles,
            tokens.grid.per_tile,
            *values.shape[2:],
        )
        return values.reshape(shape).narrow(1, self.start, self.tiles).flatten(0, 1)

    def within_image(self, picks: Tensor, tokens: VisualTokens) -> Tensor:
        """Picks ``(B * tiles, p)`` within tiles as picks within the image, same shape."""
        tile = torch.arange(self.start, self.start + self.tiles, device=picks.device)
        return picks + (tile * tokens.grid.per_tile).repeat(tokens.batch)[:, None]

    def cls_rows(self, tokens: VisualTokens) -> Tensor:
        """[CLS] row of each tile ``(R, 1, Dv)``; :class:`SelectionError` if there is none."""
        cls = tokens.require_tower().cls
        if cls is None:
            raise SelectionError.of(
                "VisualTokens.tower.cls",
                "is None: this vision tower has no [CLS] token",
                "use VisionZip with patch_only, or PruneSID in mode 'patch'",
            )
        return cls.narrow(1, self.start, self.tiles).flatten(0, 1)[:, None]
