"""Features of images, which depend only on pixels, and the caches of features and kept tokens."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, Literal, Protocol, TypeVar

import torch
from cachetools import LRUCache
from torch import Tensor

from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens, split_over_parts

Signal = Literal[
    "cls_attention",
    "relevance",
    "encoder",
    "merger_norms",
    "tower_keys",
    "tower_cls",
    "next_attention",
    "next_keys",
]
"""What policies may read of an image besides its projected tokens, computed only if a state reads
it.

cls_attention ``(N,)``: the attention that a token receives. relevance ``(N, C)``: the tokens in the
space where relevance is measured, if that is not the projected one. encoder ``(N, Dv)``: the tokens
before the projector or merger. merger_norms ``(N, 2)``: the norms of these. The others are fields
of :class:`vllm_autoprune.tpdsl.tokens.TowerStates`: tower_keys ``(N, dk)``; tower_cls ``(T, Dv)``,
one row per tile; and, of the next layer, next_attention ``(N,)`` and next_keys ``(N, Dv)``."""

Compared = Literal["projected", "encoder"]
"""Tokens that a policy compares: projected ones, or those before the projector or merger."""

Signals = Mapping[Signal, Tensor]
"""Signals of one image or region. Signals of a batch or of tiles have a leading dimension for it.
"""


def stack(parts: Sequence[Tensor]) -> Tensor:
    """``torch.stack`` that does not copy a single image, as selections only read inputs."""
    return parts[0][None] if len(parts) == 1 else torch.stack(list(parts))


def stack_present(parts: Iterable[Tensor | None]) -> Tensor | None:
    """``stack`` of a field that each of the images has; None if they do not have it."""
    present = [part for part in parts if part is not None]
    return stack(present) if present else None


_split = lru_cache(maxsize=256)(split_over_parts)


@dataclass(frozen=True, slots=True)
class Region:
    """Tokens of one image from which one selection chooses, in equal tiles."""

    grid: Grid
    """Layout of the tokens."""
    projected: Tensor
    """``(N, D)``: the tokens as the language model reads them."""
    signals: Signals = field(default_factory=dict)
    """What policies read besides the tokens."""
    extra_channels: Tensor | None = None
    """``(N, E)``: channels appended to each row unchanged; no selection or merge uses them."""
    order: Tensor | None = None
    """``(N,)``: the index of each token among all rows that the model makes of the image. None if
    the rows are the tokens of all regions, in order."""
    places: Tensor | None = None
    """``(N,)``: the index of each token among the cells with which the tower started, if it has
    dropped some."""
    share: int = 1
    """The region's share of the budget, in tiles of the vision tower."""
    cosines: dict[Compared, Tensor] = field(default_factory=dict, init=False)
    """Cosines that selections have read so far."""

    def cosine(self, compared: Compared = "projected") -> Tensor:
        """Cosines ``(N, N)`` float32 between the tokens, computed when they are first read.

        Many policies never read them, and for 16,384 tokens they take 1 GiB.
        """
        if compared not in self.cosines:
            rows = self.projected if compared == "projected" else self.signals[compared]
            self.cosines[compared] = VisualTokens(rows[None], self.grid).cosine[0]
        return self.cosines[compared]

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the record."""
        yield self.projected
        yield from self.signals.values()
        yield from self.cosines.values()
        yield from (
            part
            for part in (self.extra_channels, self.order, self.places)
            if part is not None
        )

    @property
    def rows(self) -> Tensor:
        """``(N, D + E)``: every token as the model reads it."""
        if self.extra_channels is None:
            return self.projected
        return torch.cat(
            [self.projected, self.extra_channels.to(self.projected.dtype)], dim=1
        )


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """One image after the vision tower."""

    regions: tuple[Region, ...]
    """Regions of the image; every token is in exactly one of them."""
    filler: Tensor | None = None
    """``(D,)``: a row that belongs to no token, which the model puts between tokens (LLaVA-NeXT's
    newline); None if the model has no such rows."""
    gaps: int = 0
    """Number of fillers in the unpruned image."""

    @property
    def candidates(self) -> int:
        """Number of tokens that can be chosen."""
        return sum(region.grid.tokens for region in self.regions)

    @property
    def tokens(self) -> int:
        """Number of rows that the unpruned model makes of the image, N."""
        return self.candidates + self.gaps

    def split(self, budget: int) -> tuple[int, ...]:
        """K split over the regions in proportion to their shares."""
        sizes = tuple(region.grid.tokens for region in self.regions)
        return _split(budget, sizes, tuple(region.share for region in self.regions))

    def rows(self) -> Tensor:
        """All rows ``(N, D + E)`` in the order of the unpruned model, fillers included.

        E is the number of extra channels.
        """
        parts = [region.rows for region in self.regions]
        tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.regions[0].order is None:
            return tokens
        if self.filler is None:
            return tokens[self._order.argsort()]
        rows = self.filler.to(tokens.dtype).expand(self.tokens, -1).clone()
        rows[self._order] = tokens
        return rows

    def find_kept(self, count: int) -> Tensor:
        """Indices ``(K,)``, among the N rows, of all candidates and of the first fillers."""
        if self.filler is None or count >= self.tokens:
            return torch.arange(self.tokens, device=self.device)
        is_filler = torch.ones(self.tokens, dtype=torch.bool, device=self.device)
        is_filler[self._order] = False
        surplus = is_filler & (is_filler.cumsum(0) > count - self.candidates)
        return surplus.to(torch.uint8).argsort(stable=True)[:count]

    @property
    def _order(self) -> Tensor:
        """The index of each candidate among the N rows."""
        orders = [region.order for region in self.regions if region.order is not None]
        return torch.cat(orders)

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.regions[0].projected.device

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the image except the filler, which is a weight of the model."""
        for region in self.regions:
            yield from region.tensors()

    def drop_cosines(self) -> None:
        """Drop the cosines, which are computed again when a policy reads them."""
        for region in self.regions:
            region.cosines.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.numel() * part.element_size() for part in self.tensors())


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=_Sized)


class TensorCache(Generic[T]):
    """LRU cache of records of tensors, bounded in bytes.

    It holds image features, which let further questions skip the tower, or the indices chosen from
    them. The first entry under a key stays; it may have grown when it is put again. Each entry
    counts as at least ``minimum`` bytes.
    """

    def __init__(self, limit: int, minimum: int = 0) -> None:
        self.limit = limit
        self.hits = 0
        self.misses = 0
        self._entries = LRUCache[Hashable, T](
            limit, getsizeof=lambda entry: max(minimum, entry.nbytes)
        )

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries."""
        return int(self._entries.currsize)

    def get(self, key: Hashable) -> T | None:
        """The entry, which becomes the most recently used, or None."""
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
        else:
            self.hits += 1
        return entry

    def put(self, key: Hashable, entry: T) -> None:
        """Add an entry, and drop the least recently used entries beyond the bound."""
        entry = self._entries.pop(key, entry)
        if self._entries.getsizeof(entry) <= self.limit:
            self._entries[key] = entry

    def clear(self) -> None:
        """Drop all entries, for example because the weights that made them are replaced."""
        self._entries.clear()

    def reserve(self, device: torch.device) -> Tensor | None:
        """Allocate a buffer of the bound's size, for the time in which vLLM profiles device memory.

        vLLM gives all memory that profiling left free to the KV cache, so memory that the cache
        will hold later must be in use then. The CPU's KV cache has a fixed size, so nothing is
        reserved there.
        """
        if device.type == "cpu" or self.limit == 0:
            return None
        return torch.empty(self.limit, dtype=torch.uint8, device=device)


# Kept tokens of images: the indices that were chosen first for an item.
#
# KV blocks stay in vLLM's prefix cache longer than the image's features stay here. So the indices
# from which they were made are kept longer too: an image that is encoded again keeps the same
# tokens, and items that are chosen after them leave out the same tokens.


_MAX_ITEMS = 8192
"""Maximum number of items whose indices are kept; each counts as at least 160 tokens."""

_MAX_INDEX_BYTES = _MAX_ITEMS * 160 * 8
"""Bound of all indices, 10 MB, because a client may choose a K of many thousands."""


class IndexCache(TensorCache[Tensor]):
    """The tokens that each item keeps: indices ``(K,)`` in the order of the item's rows."""

    def __init__(self) -> None:
        super().__init__(_MAX_INDEX_BYTES, minimum=_MAX_INDEX_BYTES // _MAX_ITEMS)
