"""*Acc.* and *Rel.*: the scores of many benchmarks as one figure, by each definition in use.

Acc. is the mean over benchmarks, MME divided by a constant first (AutoPrune paper, supplement,
"Evaluation Metrics"). Rel. is written there as a ratio of means; most tables print a mean of
ratios (CDPruner's definition). The two differ by up to four points, so a figure without its
definition says little.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from vllm_autoprune.evaluation.records import MME

Scores = Mapping[str, float]
"""Scores by benchmark, each in its official unit: points for MME, per cent for all others."""

MMBENCH = ("MMB-EN", "MMB-CN")


def normalise(scores: Scores, mme_divisor: float, without: Collection[str] = ()) -> Scores:
    """Scores with MME divided by ``mme_divisor``, which turns its points into per cent.

    Leaves out the benchmarks in ``without``; raises ValueError if none is left.
    """
    used = {
        name: score / mme_divisor if name == MME else score
        for name, score in scores.items()
        if name not in without
    }
    if not used:
        raise ValueError("no benchmark is left to average")
    return used


def accuracy(scores: Scores, mme_divisor: float, without: Collection[str] = ()) -> float:
    """Acc.: the mean over benchmarks, MME normalised."""
    used = normalise(scores, mme_divisor, without)
    return sum(used.values()) / len(used)


def ratio_of_means(
    scores: Scores, full: Scores, mme_divisor: float, without: Collection[str] = ()
) -> float:
    """Rel. as the paper writes it: 100 x Acc. of the pruned over Acc. of the full model."""
    _check_same_benchmarks(scores, full)
    return 100 * accuracy(scores, mme_divisor, without) / accuracy(full, mme_divisor, without)


def mean_of_ratios(scores: Scores, full: Scores, without: Collection[str] = ()) -> float:
    """Rel. as CDPruner defines it: 100 x the mean over benchmarks of pruned over full.

    The divisor of MME cancels out.
    """
    _check_same_benchmarks(scores, full)
    used = normalise(scores, 1.0, without)
    return 100 * sum(score / full[name] for name, score in used.items()) / len(used)


def _check_same_benchmarks(scores: Scores, full: Scores) -> None:
    """Raise ValueError unless both were scored on the same benchmarks."""
    different = sorted(scores.keys() ^ full.keys())
    if different:
        raise ValueError(f"not scored on the same benchmarks: {', '.join(different)}")
