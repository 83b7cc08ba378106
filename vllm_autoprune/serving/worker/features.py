"""Features of images, which depend on pixels alone, and the caches of features and kept tokens."""

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
"""What policies read of an image beside its projected tokens, only where a state reads it.

cls_attention ``(N,)``, the attention that a token gets; relevance ``(N, C)``, the tokens in the
space where relevance is measured, if that is not the projected one; encoder ``(N, Dv)``, the tokens
before the projector or merger, and merger_norms ``(N, 2)`` their norms. Of
:class:`vllm_autoprune.tpdsl.tokens.TowerStates`: tower_keys ``(N, dk)``, and tower_cls ``(T, Dv)``,
one row a tile and not a token; of the layer after it next_attention ``(N,)`` and next_keys ``(N,
Dv)``.
"""

Compared = Literal["projected", "encoder"]
"""Tokens that a policy compares: projected ones, or those before the projector or merger."""

Signals = Mapping[Signal, Tensor]
"""Signals of one image or region; of a batch or of tiles, with their number in front."""


def stack(parts: Sequence[Tensor]) -> Tensor:
    """``torch.stack``; a single image is not copied, because a selection only reads its inputs."""
    return parts[0][None] if len(parts) == 1 else torch.stack(list(parts))


def stack_present(parts: Iterable[Tensor | None]) -> Tensor | None:
    """``stack`` of what each of the images has; None where they have none."""
    present = [part for part in parts if part is not None]
    return stack(present) if present else None


_split = lru_cache(maxsize=256)(split_over_parts)


@dataclass(frozen=True, slots=True)
class Region:
    """Tokens of one image that one selection chooses from, in equal tiles."""

    grid: Grid
    """Their layout."""
    projected: Tensor
    """``(N, D)``: the tokens as the language model reads them."""
    signals: Signals = field(default_factory=dict)
    """What policies read beside them."""
    extra_channels: Tensor | None = None
    """``(N, E)``: appended to each row as they are; nothing selects by them or merges them."""
    order: Tensor | None = None
    """``(N,)``: the index of each token among all rows that the model makes of the image; None
    where the tokens of all regions are the rows, in their order."""
    share: int = 1
    """The region's part of the budget, in tiles of the vision tower."""
    cosines: dict[Compared, Tensor] = field(default_factory=dict, init=False)
    """Cosines that selections have read so far."""

    def cosine(self, compared: Compared = "projected") -> Tensor:
        """Cosines ``(N, N)`` float32 between the tokens, computed when first read.

        Many policies never read them, and of 16,384 tokens they take 1 GiB.
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
            part for part in (self.extra_channels, self.order) if part is not None
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
    """Its tokens; every one is in one region."""
    filler: Tensor | None = None
    """``(D,)``: a row that stands for no token, which the model puts between tokens (LLaVA-NeXT's
    newline); None where it has no such rows."""
    gaps: int = 0
    """How many fillers the unpruned image has."""

    @property
    def candidates(self) -> int:
        """Tokens that can be chosen."""
        return sum(region.grid.tokens for region in self.regions)

    @property
    def tokens(self) -> int:
        """Rows that the unpruned model makes of the image, N."""
        return self.candidates + self.gaps

    def split(self, budget: int) -> tuple[int, ...]:
        """K split over the regions in proportion to their shares."""
        sizes = tuple(region.grid.tokens for region in self.regions)
        return _split(budget, sizes, tuple(region.share for region in self.regions))

    def rows(self) -> Tensor:
        """All rows ``(N, D + E)`` in the order of the unpruned model, fillers included.

        E are the extra channels.
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
        """Indices ``(K,)`` among N rows where all candidates are kept, and the first fillers."""
        if self.filler is None or count >= self.tokens:
            return torch.arange(self.tokens, device=self.device)
        is_filler = torch.ones(self.tokens, dtype=torch.bool, device=self.device)
        is_filler[self._order] = False
        surplus = is_filler & (is_filler.cumsum(0) > count - self.candidates)
        return surplus.to(torch.uint8).argsort(stable=True)[:count]

    @property
    def _order(self) -> Tensor:
        """The index of each candidate among N rows."""
        orders = [region.order for region in self.regions if region.order is not None]
        return torch.cat(orders)

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.regions[0].projected.device

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the image, but not the filler, which is a weight of the model."""
        for region in self.regions:
            yield from region.tensors()

    def drop_cosines(self) -> None:
        """Drop what is computed anew where a policy reads it."""
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

    Of image features, which let further questions skip the tower, and of what is chosen of them.
    The entry that is put first under a key stays; it may have grown when it is put again. Each
    counts as ``minimum`` bytes or more.
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
        """The entry, now the most recently used, or None."""
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
        else:
            self.hits += 1
        return entry

    def put(self, key: Hashable, entry: T) -> None:
        """Keep an entry, dropping the least recently used ones beyond the bound."""
        entry = self._entries.pop(key, entry)
        if self._entries.getsizeof(entry) <= self.limit:
            self._entries[key] = entry

    def clear(self) -> None:
        """Drop all entries, as when the weights that they were made with are replaced."""
        self._entries.clear()

    def reserve(self, device: torch.device) -> Tensor | None:
        """Allocate a buffer of the bound's size, for the time that vLLM profiles device memory.

        vLLM gives all memory that profiling left free to the KV cache, so what the cache will hold
        later has to be seen then. The CPU's KV cache has a fixed size: nothing to reserve.
        """
        if device.type == "cpu" or self.limit == 0:
            return None
        return torch.empty(self.limit, dtype=torch.uint8, device=device)


# Kept tokens of images: what was chosen first for an item.
#
# KV blocks stay in vLLM's prefix cache longer than the image's features stay here. The indices of
# the tokens that they were made of are kept for longer too: an image that is encoded again keeps
# those tokens, and what is chosen after them leaves out the same ones.


_MAX_ITEMS = 8192
"""Items whose indices are kept at most; each counts as one of 160 tokens or more."""

_MAX_INDEX_BYTES = _MAX_ITEMS * 160 * 8
"""Bound of all indices, 10 MB: a client may choose a K of many thousands."""


class IndexCache(TensorCache[Tensor]):
    """Indices ``(K,)`` of items in the order of their rows."""

    def __init__(self) -> None:
        super().__init__(_MAX_INDEX_BYTES, minimum=_MAX_INDEX_BYTES // _MAX_ITEMS)
