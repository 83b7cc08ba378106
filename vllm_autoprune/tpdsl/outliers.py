"""Which scores stand out: the interquartile rule that PruMerge and TRIM count by.

Knows nothing about what is scored.
"""

from __future__ import annotations

from torch import Tensor


def outliers(score: Tensor) -> Tensor:
    """``(R, n)`` bool: scores above Q3 + 1.5 (Q3 - Q1) of their row.

    Quartiles in float32, linear between neighbours and rounded as numpy's ``percentile`` does it,
    which the published code calls. NaN is no outlier.
    """
    ordered = score.float().sort(dim=1).values
    low, high = _quantile(ordered, 0.25), _quantile(ordered, 0.75)
    return score.float() > (high + 1.5 * (high - low))[:, None]


def _quantile(ordered: Tensor, share: float) -> Tensor:
    """``(R,)``: the value that ``share`` of an ascending row ``(R, n)`` lies below."""
    place = share * (ordered.shape[1] - 1)
    below = int(place)
    part = place - below
    a, b = ordered[:, below], ordered[:, min(below + 1, ordered.shape[1] - 1)]
    # The form that is exact at the nearer end.
    return a + (b - a) * part if part < 0.5 else b - (b - a) * (1 - part)
