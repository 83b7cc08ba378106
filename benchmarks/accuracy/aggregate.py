"""*Acc.* and *Rel.*: many benchmark scores as one figure, by each of the definitions in use.

Knows nothing about where scores come from.

Acc. is the mean over benchmarks, MME divided by a constant first (AutoPrune paper, supplement,
"Evaluation Metrics"). Rel. is written there as a ratio of means; most tables print a mean of
ratios (CDPruner's definition). The two differ by up to four points, so a figure without its
definition says little.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

Scores = Mapping[str, float]
"""By benchmark, each in its official unit: per cent, but points for MME."""

MME = "MME"
MMBENCH = ("MMB-EN", "MMB-CN")
MME_DIVISOR = {"llava": 20.0, "llava_next": 20.0, "qwen2_5_vl": 28.0}
"""Perception of at most 2000 points, or perception and cognition of at most 2800, to per cent."""


def normalised(scores: Scores, mme_divisor: float, without: Collection[str] = ()) -> Scores:
    """MME divided, benchmarks in ``without`` left out; raises ValueError where none is left."""
    kept = {
        name: score / mme_divisor if name == MME else score
        for name, score in scores.items()
        if name not in without
    }
    if not kept:
        raise ValueError("no benchmark is left to take a mean of")
    return kept


def accuracy(scores: Scores, mme_divisor: float, without: Collection[str] = ()) -> float:
    """Acc.: the mean over benchmarks, MME normalised."""
    kept = normalised(scores, mme_divisor, without)
    return sum(kept.values()) / len(kept)


def ratio_of_means(
    scores: Scores, full: Scores, mme_divisor: float, without: Collection[str] = ()
) -> float:
    """Rel. as the paper writes it: 100 x Acc. of the pruned over Acc. of the full model."""
    _same_benchmarks(scores, full)
    return 100 * accuracy(scores, mme_divisor, without) / accuracy(full, mme_divisor, without)


def mean_of_ratios(scores: Scores, full: Scores, without: Collection[str] = ()) -> float:
    """Rel. as CDPruner means it: 100 x the mean over benchmarks of pruned over full.

    A divisor of MME would cancel out.
    """
    _same_benchmarks(scores, full)
    kept = normalised(scores, 1.0, without)
    return 100 * sum(score / full[name] for name, score in kept.items()) / len(kept)


def _same_benchmarks(scores: Scores, full: Scores) -> None:
    """Raises ValueError where the two were not scored on the same benchmarks."""
    different = sorted(scores.keys() ^ full.keys())
    if different:
        raise ValueError(f"not scored on the same benchmarks: {', '.join(different)}")
