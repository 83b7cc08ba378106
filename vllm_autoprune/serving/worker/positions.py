"""Positions of kept tokens as channels of their rows: how they are written, and read.

A position is two digits of base 256 on each axis, counted from the image's first position; all of
an item's channels are below 0 where its tokens stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_autoprune.serving.plan import LINE

_BASE = 256
_DIGITS = 2  # enough for MAX_SPAN


def count_channels(axes: int) -> int:
    """Channels of a row where positions have so many axes."""
    return 0 if axes == 0 else _DIGITS * (1 if axes == LINE else axes)


def encode_offsets(offsets: Tensor) -> Tensor:
    """Offsets ``(M, A)`` from an image's first position as channels ``(M, 2 A)`` float32."""
    return torch.stack([offsets // _BASE, offsets % _BASE], dim=2).flatten(1).float()


def decode_offsets(channels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Offsets ``(A, M)`` of several items by their channels, and which are set ``(M,)``."""
    joined = torch.cat([part.float() for part in channels])
    digits = joined.long().unflatten(1, (-1, _DIGITS))
    return (digits[:, :, 0] * _BASE + digits[:, :, 1]).T, joined[:, 0] >= 0


def spread_offsets(rows: int, span: int, device: torch.device) -> Tensor:
    """Offsets ``(L,)`` of rows that are spread evenly over a span of positions."""
    return torch.arange(rows, device=device) * span // max(rows, 1)


def match_rows(is_row: Tensor, computed: int, count: int) -> tuple[Tensor, Tensor]:
    """Which of a prompt's tokens ``(L,)`` are of a step's rows, and the row of each ``(L,)``.

    ``is_row`` marks the tokens that have rows; the step begins at token ``computed``.
    """
    ahead = is_row & (torch.arange(len(is_row), device=is_row.device) >= computed)
    rank = ahead.cumsum(0) - 1
    return ahead & (rank < count), rank.clamp(0, max(count - 1, 0))
