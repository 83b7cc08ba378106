"""Answers of one policy to a row of examples, and the figures that are made of them.

Knows nothing about who answered. The objective is dense and paired: the mean log-probability of
the reference answer, less what the full-token model gives it on the same example. Accuracy and
accuracy+ are MME's, and are reported; they steer nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offline_search.examples import Example
from offline_search.records import Measured

Floats = NDArray[np.float64]

DRAWS = 2000


@dataclass(frozen=True, slots=True)
class Answers:
    """log-probability of each reference answer, and whether it was the likeliest one."""

    logprob: tuple[float, ...]
    right: tuple[bool, ...]

    def __add__(self, other: Answers) -> Answers:
        return Answers(self.logprob + other.logprob, self.right + other.right)

    def __len__(self) -> int:
        return len(self.logprob)


NONE = Answers((), ())


def relative(answers: Answers, full: Answers) -> Floats:
    """Log-probability of each reference answer less the full-token model's, ``(M,)``."""
    count = len(answers)
    gaps: Floats = np.asarray(answers.logprob) - np.asarray(full.logprob[:count])
    return gaps


def accuracy(answers: Answers) -> float:
    """Share of examples whose reference answer was the likeliest."""
    return sum(answers.right) / len(answers.right)


def accuracy_plus(examples: Sequence[Example], answers: Answers) -> float:
    """Share of pairs with both right; without pairs, of images with all right (MME's rule)."""
    groups: dict[tuple[str, int | str], bool] = {}
    paired = any(example.pair is not None for example in examples)
    for example, right in zip(examples, answers.right, strict=False):
        if paired and example.pair is None:
            continue
        key = (example.image, example.pair if example.pair is not None else "")
        groups[key] = groups.get(key, True) and right
    return sum(groups.values()) / len(groups) if groups else 0.0


def mme_total(examples: Sequence[Example], answers: Answers) -> float:
    """MME's total: accuracy and accuracy+ of each category in per cent, summed."""
    total = 0.0
    for category in dict.fromkeys(example.category for example in examples):
        rows = [i for i, example in enumerate(examples) if example.category == category]
        part = Answers(
            tuple(answers.logprob[i] for i in rows), tuple(answers.right[i] for i in rows)
        )
        total += 100 * (accuracy(part) + accuracy_plus([examples[i] for i in rows], part))
    return total


def by_category(examples: Sequence[Example], values: Floats) -> dict[str, float]:
    """The mean of each category."""
    found: dict[str, list[float]] = {}
    for example, value in zip(examples, values.tolist(), strict=False):
        found.setdefault(example.category, []).append(value)
    return {name: round(float(np.mean(found[name])), 6) for name in sorted(found)}


def interval(examples: Sequence[Example], values: Floats) -> Measured:
    """Mean and 95 % bootstrap interval; images are resampled, for their questions share luck."""
    count = len(values)
    _, places = np.unique([example.image for example in examples[:count]], return_inverse=True)
    sums = np.bincount(places, values)
    counts = np.bincount(places)
    picks = np.random.default_rng(0).integers(len(sums), size=(DRAWS, len(sums)))
    means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return Measured(
        value=round(float(values.mean()), 6), low=round(float(low), 6), high=round(float(high), 6)
    )


def surely_below(examples: Sequence[Example], values: Floats, rival: Floats) -> bool:
    """Whether paired differences to a rival lie below zero, by three standard errors of images.

    Three, not two: a race looks several times at every candidate.
    """
    gaps = values - rival[: len(values)]
    _, places = np.unique([example.image for example in examples[: len(gaps)]], return_inverse=True)
    sums = np.bincount(places, gaps)
    if len(sums) < 4:
        return False
    error = float(sums.std(ddof=1)) * len(sums) ** 0.5 / len(gaps)
    return bool(gaps.mean() + 3 * error < 0)
