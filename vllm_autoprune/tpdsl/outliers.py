"""Outliers of a score by the interquartile rule, as PruMerge and TRIM count them."""

from __future__ import annotations

from torch import Tensor


def outliers(score: Tensor) -> Tensor:
    """Outliers of each row, ``(R, n)`` bool: scores above Q3 + 1.5 (Q3 - Q1).

    Quartiles are float32 with linear interpolation, rounded as by numpy's ``percentile``, which the
    published code calls. NaN is not an outlier.
    """
    ordered = score.float().sort(dim=1).values
    low, high = _quantile(ordered, 0.25), _quantile(ordered, 0.75)
    return score.float() > (high + 1.5 * (high - low))[:, None]


def _quantile(ordered: Tensor, share: float) -> Tensor:
    """Quantile ``(R,)`` at ``share`` of ascending rows ``(R, n)``."""
    place = share * (ordered.shape[1] - 1)
    below = int(place)
    part = place - below
    a, b = ordered[:, below], ordered[:, min(below + 1, ordered.shape[1] - 1)]
    # Interpolate from the nearer end, where the result is exact.
    return a + (b - a) * part if part < 0.5 else b - (b - a) * (1 - part)
