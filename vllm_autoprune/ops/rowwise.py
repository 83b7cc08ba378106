"""Tensor helpers shared by atoms and base policies: normalising, ranking, masks, uploads.

All of them keep shapes static, so none of them synchronises with the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNED = 16
"""Float32 numbers per cache line: sums over aligned rows are rounded the same way everywhere."""

FLAT = 1e-12
"""Range below which a score counts as constant."""

TIE = 2**-21
"""Difference within which values count as equal: 5e-7. A cosine in float32 is up to 5e-7 from its
exact value, and mostly 1e-7. The best two tokens of a step are at least 1.1e-6 apart in all golden
cases, or bit-identical."""


def min_max_normalise(score: Tensor, offset: float = 0.0) -> Tensor:
    """Min-max normalise the last axis, ``(..., N) -> (..., N)``; a constant score becomes all ones.

    ``offset`` is added to the numerator only, as CDPruner's code does with 1e-6.
    """
    low, high = torch.aminmax(score, dim=-1, keepdim=True)
    spread = high - low
    raised = score - low + offset if offset else score - low
    return (raised / spread.clamp_min(FLAT)).masked_fill_(spread < FLAT, 1.0)


def rank_descending(score: Tensor) -> Tensor:
    """Indices ``(..., N)`` by descending score; ties go to the lower index."""
    return score.argsort(dim=-1, descending=True, stable=True)


def argmax_within(values: Tensor, *, relative: bool = False) -> tuple[Tensor, Tensor]:
    """Lowest index ``(B,)`` of a value at or above a bound in each row ``(B, N)``, and the bound.

    The bound ``(B, 1)`` is the maximum less ``TIE``, because values that are equal in exact
    arithmetic are rounded differently on another device or in another batch. With ``relative``, it
    is the maximum times 1 - ``TIE``. This is above a negative maximum, whose own index is returned
    then. A row with NaN has the bound NaN and the index 0.
    """
    bound = values.amax(dim=1, keepdim=True)
    bound = bound.mul_(1 - TIE) if relative else bound.sub_(TIE)
    return values.clamp_max(bound).argmax(dim=1), bound


def mask_from_indices(indices: Tensor, count: int) -> Tensor:
    """Membership mask ``(B, count)`` of the indices ``(B, K)``."""
    mask = torch.zeros(indices.shape[0], count, dtype=torch.bool, device=indices.device)
    return mask.scatter_(1, indices, True)


def indices_from_mask(mask: Tensor, count: int) -> Tensor:
    """The ``count`` true positions of a mask ``(B, N)``, ascending, ``(B, count)``.

    Every row must have exactly ``count`` true positions.
    """
    order = torch.sort(
        mask.to(torch.uint8), dim=1, descending=True, stable=True
    ).indices
    return order[:, :count]


def positions_in_order(order: Tensor, allowed: Tensor) -> Tensor:
    """Position ``(B, N)`` int64 of each token in an order ``(B, M)`` of token indices.

    N for a token that is not in the order or not in the mask ``allowed`` ``(B, N)``.
    """
    batch, count = allowed.shape
    last = torch.full((batch, count), count, dtype=torch.int64, device=order.device)
    rising = torch.arange(order.shape[1], device=order.device).expand(batch, -1)
    return last.scatter_(1, order, rising).masked_fill(~allowed, count)


def row_offsets(batch: int, tokens: int, device: torch.device) -> Tensor:
    """Offset ``(B,)`` of each image's first row where the N rows of all images are concatenated."""
    return torch.arange(0, batch * tokens, max(tokens, 1), device=device)


def gather_rows(values: Tensor, indices: Tensor) -> Tensor:
    """Rows ``(B, K, D)`` of values ``(B, N, D)`` at indices ``(B, K)``.

    Copies whole rows, ten times faster than ``gather`` with an expanded index.
    """
    batch, tokens, width = values.shape
    offset = row_offsets(batch, tokens, indices.device)[:, None]
    rows = values.reshape(batch * tokens, width)
    return rows.index_select(0, (indices + offset).flatten()).view(batch, -1, width)


def find_outliers(score: Tensor) -> Tensor:
    """Outliers of each row, ``(R, n)`` bool: scores above Q3 + 1.5 (Q3 - Q1).

    Quartiles are float32 with linear interpolation, rounded as by numpy's ``percentile``, which the
    published code calls. NaN is not an outlier.
    """
    ordered = score.float().sort(dim=1).values
    low = _quantile(ordered, 0.25)
    high = _quantile(ordered, 0.75)
    return score.float() > (high + 1.5 * (high - low))[:, None]


def _quantile(ordered: Tensor, share: float) -> Tensor:
    """Quantile ``(R,)`` at ``share`` of ascending rows ``(R, n)``."""
    position = share * (ordered.shape[1] - 1)
    below = int(position)
    part = position - below
    a = ordered[:, below]
    b = ordered[:, min(below + 1, ordered.shape[1] - 1)]
    # Interpolate from the nearer end, so that the result is exact at both ends.
    return a + (b - a) * part if part < 0.5 else b - (b - a) * (1 - part)


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device; on a CPU it is the tensor itself.

    A plain ``values.to(device)`` or ``torch.tensor(..., device=device)`` returns only once a GPU
    has finished all its work, because the copy is made from memory that is not pinned.
    """
    staged = values.pin_memory() if device.type == "cuda" else values
    return staged.to(device, non_blocking=True)
