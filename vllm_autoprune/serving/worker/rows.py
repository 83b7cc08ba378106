"""Rows of an item for the language model: text between its tokens, positions as channels.

A position is two digits in base 256 on each axis, counted from the image's first position. All
channels of an item are below 0 if its tokens stand one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from vllm_autoprune.ops.rowwise import upload
from vllm_autoprune.serving.plan import LINE, ItemPlan
from vllm_autoprune.serving.worker.features import ImageFeatures

_BASE = 256
_DIGITS = 2  # enough for MAX_SPAN


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Rows that an item keeps, or those of a batch of items, and their places in the image.

    A row that belongs to no single token may have different values in ``sort_keys`` and
    ``positions``.
    """

    rows: Tensor
    """``(..., K, D + E)``, as the language model reads them."""
    sort_keys: Tensor
    """``(..., K)``: the index, among the image's N rows, by which the row is sorted, also among the
    text of the image."""
    positions: Tensor
    """``(..., K)``: the index, among the image's N rows, whose position the row gets."""

    @classmethod
    def keep_all(cls, image: ImageFeatures, count: int) -> KeptRows:
        """Copy all tokens of an image, and the fillers needed for ``count`` rows."""
        indices = image.find_kept(count)
        rows = image.rows()
        if len(indices) < len(rows):
            rows = rows[indices]
        elif rows is image.regions[0].projected:  # it may be cached
            rows = rows.clone()
        return cls(rows, indices, indices)

    @classmethod
    def join(cls, parts: Sequence[KeptRows]) -> KeptRows:
        """Concatenate the rows of the parts."""
        return cls(
            torch.cat([part.rows for part in parts], dim=-2),
            torch.cat([part.sort_keys for part in parts], dim=-1),
            torch.cat([part.positions for part in parts], dim=-1),
        )

    def take(self, order: Tensor) -> KeptRows:
        """The rows ``(..., M)`` at the indices ``order``, which are below K."""
        wide = order[..., None].expand(*order.shape, self.rows.shape[-1])
        return KeptRows(
            self.rows.gather(-2, wide),
            self.sort_keys.gather(-1, order),
            self.positions.gather(-1, order),
        )

    def unbind(self) -> list[KeptRows]:
        """The rows of each item of a batch."""
        tensors = zip(self.rows, self.sort_keys, self.positions, strict=True)
        return [KeptRows(*of_item) for of_item in tensors]

    def with_channels(self, axes: int, plan: ItemPlan, span: int) -> Tensor:
        """Rows ``(K, D + E)`` of an item, with positions on ``axes`` axes as last channels.

        On one axis, positions are within the ``span`` of the whole item. Under M-RoPE, rows carry
        their positions already.
        """
        rows = self.rows
        if axes == LINE:
            positions = self.positions
            if plan.positions == "spread":
                positions = spread_offsets(len(rows), span, rows.device)
            channels = encode_offsets(positions[:, None]).to(rows.dtype)
            if not plan.moves:
                channels = torch.full_like(channels, -1)
            rows = torch.cat([rows, channels], dim=1)
        elif axes and plan.positions == "packed":
            rows[:, -count_channels(axes) :] = -1
        return rows


def insert_text(
    items: Sequence[KeptRows],
    plans: Sequence[ItemPlan],
    images: Sequence[ImageFeatures],
    embed: Callable[[Tensor], Tensor],
    set_times: Callable[[Tensor, Tensor], None] | None = None,
) -> list[KeptRows]:
    """Insert the text of each item after the tokens that precede it in the unpruned image.

    Rows between the same two texts stay in their order. Positions are then those of the item with
    its text. ``embed`` maps token ids to rows; ``set_times`` sets the positions in time of rows
    that carry them.
    """
    texts = [entry for plan in plans for entry in plan.text]
    if not texts:
        return list(items)
    table = torch.tensor(texts).T.contiguous()
    tokens_before, ids = upload(table, items[0].rows.device)
    counts = [len(plan.text) for plan in plans]
    parts = zip(
        items,
        images,
        tokens_before.split(counts),
        embed(ids).split(counts),
        strict=True,
    )
    merged = []
    for item, image, offsets, text in parts:
        offsets = offsets.clamp(
            max=image.tokens
        )  # otherwise positions would have no bound
        number = torch.arange(len(text), device=offsets.device)
        # Channels that are not the language model's are 0.
        missing = item.rows.shape[1] - text.shape[1]
        rows = functional.pad(text.to(item.rows.dtype), (0, missing))
        texts_before = torch.searchsorted(offsets, item.sort_keys, right=True)
        shift = torch.searchsorted(offsets, item.positions, right=True)
        shifted = replace(item, positions=item.positions + shift)
        joined = KeptRows.join([shifted, KeptRows(rows, offsets, offsets + number)])
        if set_times is not None:
            # A text token takes one position, and a frame as many as its longer side.
            grid = image.regions[0].grid
            frames = joined.sort_keys // (grid.height * grid.width)
            times = torch.cat([texts_before, number])
            set_times(joined.rows, times + frames * max(grid.height, grid.width))
        order = torch.cat([2 * texts_before, 2 * number + 1]).argsort(stable=True)
        merged.append(joined.take(order))
    return merged


def count_channels(axes: int) -> int:
    """Number of channels that hold the position of a row on ``axes`` axes."""
    return 0 if axes == 0 else _DIGITS * (1 if axes == LINE else axes)


def encode_offsets(offsets: Tensor) -> Tensor:
    """Offsets ``(M, A)`` from an image's first position as channels ``(M, 2 A)`` float32."""
    return torch.stack([offsets // _BASE, offsets % _BASE], dim=2).flatten(1).float()


def decode_offsets(channels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Offsets ``(A, M)`` of several items from their channels, and which are set, ``(M,)``."""
    joined = torch.cat([part.float() for part in channels])
    digits = joined.long().unflatten(1, (-1, _DIGITS))
    return (digits[:, :, 0] * _BASE + digits[:, :, 1]).T, joined[:, 0] >= 0


def spread_offsets(rows: int, span: int, device: torch.device) -> Tensor:
    """Offsets ``(rows,)`` of rows that are spread evenly over ``span`` positions."""
    return torch.arange(rows, device=device) * span // max(rows, 1)


def match_rows(is_row: Tensor, computed: int, count: int) -> tuple[Tensor, Tensor]:
    """Mask ``(L,)`` of a prompt's tokens with rows in this step, and their rows ``(L,)``.

    ``is_row`` marks the tokens that have rows; the step begins at token ``computed``.
    """
    ahead = is_row & (torch.arange(len(is_row), device=is_row.device) >= computed)
    rank = ahead.cumsum(0) - 1
    return ahead & (rank < count), rank.clamp(0, max(count - 1, 0))
