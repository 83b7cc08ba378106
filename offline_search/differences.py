"""Differences between policies on the questions that they were asked, with standard errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.statistics import Estimate, Floats, round_portably

Verdict = Literal["better", "worse", "same", "undecided"]
"""Verdict of a difference on the first of two policies."""

WORDS: Mapping[Verdict, str] = {
    "better": "higher",
    "worse": "lower",
    "same": "same",
    "undecided": "undecided",
}
"""Words of prompts for verdicts, with which hypotheses state what they expect."""

MINIMUM_IMAGES = 4
"""Smallest number of images for which a standard error is estimated."""

SMALLEST_CHANGE = 0.01
"""Values of a question that differ by no more count as unchanged."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean difference between the values of two policies, and its standard error."""

    value: float
    error: float

    def verdict(self, resolution: float = 0.0, errors: float = 2.0) -> Verdict:
        """Whether the difference exceeds both ``resolution`` and ``errors`` standard errors.

        It is ``better`` or ``worse`` if it does, ``same`` if difference and ``errors`` standard
        errors are both within ``resolution``, and ``undecided`` otherwise.
        """
        if max(abs(self.value), errors * self.error) <= resolution:
            return "same"
        if abs(self.value) <= max(resolution, errors * self.error):
            return "undecided"
        return "better" if self.value > 0 else "worse"

    def judge(self, resolution: float, decimals: int) -> Verdict:
        """Verdict on a difference for prompts, by the figures of ``decimals`` that they print.

        ``same`` if the difference, two standard errors either way, lies within ``resolution``;
        else ``better`` or ``worse`` by two standard errors.
        """
        # Shares of a last decimal would decide what no reader can check; as integers, sums of
        # figures are exact.
        figures = [round(x, decimals) for x in (self.value, self.error, resolution)]
        value, error, limit = (
            round(figure * 10**decimals) if math.isfinite(figure) else math.inf
            for figure in figures
        )
        is_within = abs(value) + 2 * error <= limit
        return "same" if is_within else Difference(value, error).verdict()

    @property
    def low(self) -> float:
        """The difference minus two standard errors."""
        return self.value - 2 * self.error

    def estimate(self) -> Estimate:
        """The difference with an interval of two standard errors on both sides."""
        return Estimate(self.value, self.low, self.value + 2 * self.error).rounded(6)


def count_decimals(error: float) -> int:
    """Decimals that show two digits of a standard error, from 2 to 4, as more say nothing."""
    if not 0 < error < math.inf:
        return 2
    return min(max(1 - math.floor(math.log10(error)), 2), 4)


@dataclass(frozen=True, slots=True)
class Strata:
    """Post-stratification: categories of questions, and the weight of each category in a mean.

    ``codes`` ``(M,)`` has the category of each question, ``shares`` ``(C,)`` the shares of the
    categories in the population that a mean stands for. With several models, a category is of one.
    """

    codes: NDArray[np.int64]
    shares: Floats

    @classmethod
    def of(cls, examples: Sequence[Example], population: NDArray[np.bool_]) -> Strata:
        """The categories of ``examples``, with their shares in the mask ``population`` ``(M,)``."""
        names = [example.stratum for example in examples]
        codes = np.unique(names, return_inverse=True)[1]
        counts = np.bincount(codes[population], minlength=codes.max(initial=0) + 1)
        return cls(codes, counts / max(counts.sum(), 1))

    def weights(self, answered: NDArray[np.bool_]) -> Floats:
        """Weights ``(M,)`` of the questions in the mask ``answered`` ``(M,)``; their sum is 1.

        The share of a category without answers is spread over all answered questions.
        """
        counts = np.bincount(self.codes[answered], minlength=len(self.shares))
        of_category = np.where(counts > 0, self.shares / np.maximum(counts, 1), 0.0)
        missing = float(self.shares[counts == 0].sum())
        spread = missing / max(int(answered.sum()), 1)
        weights: Floats = np.where(answered, of_category[self.codes] + spread, 0.0)
        return weights


def compare(
    examples: Sequence[Example],
    values: Floats,
    reference: Floats,
    difficulty: Floats | None = None,
    strata: Strata | None = None,
) -> Difference:
    """Difference between the means of two policies, with a standard error clustered by image.

    ``values`` and ``reference`` ``(M,)`` are NaN for questions that a policy was not asked. If both
    answered the same questions, it is the ordinary paired difference. Otherwise both means are
    corrected for the ``difficulty`` ``(M,)`` of their questions, whose own error is neglected, and
    weighted by ``strata``. The error is infinite on fewer than four images.
    """
    _, images = np.unique([example.image for example in examples], return_inverse=True)
    mean = 0.0
    fewest = len(images)
    terms = np.zeros(len(values))
    for sign, scores in ((1.0, values), (-1.0, reference)):
        rows = np.isfinite(scores)
        if not rows.any():
            return Difference(0.0, math.inf)
        corrected = scores[rows]
        if difficulty is not None:
            corrected = corrected - difficulty[rows]
        weights = np.full(len(corrected), 1 / len(corrected))
        if strata is not None:
            weights = strata.weights(rows)[rows]
        level = float(weights @ corrected)
        mean += sign * level
        terms[rows] += sign * weights * (corrected - level)
        fewest = min(fewest, len(np.unique(images[rows])))
    mean = round_portably(mean)
    if fewest < MINIMUM_IMAGES:
        return Difference(mean, math.inf)
    sums = np.bincount(images, terms)
    count = len(np.unique(images[np.isfinite(values) | np.isfinite(reference)]))
    error = math.sqrt(count / (count - 1) * float(sums @ sums))
    return Difference(mean, round_portably(error))


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Difference of two policies over the ``questions`` that both were asked.

    ``rises`` and ``falls`` count the questions whose value changes by more than
    :data:`SMALLEST_CHANGE`.
    """

    mean: Difference
    questions: int
    rises: int
    falls: int

    def describe(self, decimals: int, resolution: float) -> str:
        """The difference with its standard error, the verdict, and its numbers of questions."""
        if not self.questions:
            return "unknown, as no question was asked of both"
        error = "unknown"
        if np.isfinite(self.mean.error):
            error = f"{self.mean.error:.{decimals}f}"
        verdict = WORDS[self.mean.judge(resolution, decimals)]
        return (
            f"{self.mean.value:+z.{decimals}f} ± {error}, {verdict} "
            f"(of {self.questions}, {self.rises} up, {self.falls} down)"
        )


def compare_paired(
    examples: Sequence[Example], values: Floats, reference: Floats
) -> PairedDifference:
    """Plain mean of the differences of values ``(M,)``, with its standard error over images.

    values, reference: not a number where a question was not asked.
    """
    changes = values - reference
    is_shared = np.isfinite(changes)
    return PairedDifference(
        mean=compare(
            examples,
            np.where(is_shared, values, np.nan),
            np.where(is_shared, reference, np.nan),
        ),
        questions=int(is_shared.sum()),
        rises=int(np.sum(changes > SMALLEST_CHANGE)),
        falls=int(np.sum(changes < -SMALLEST_CHANGE)),
    )


def fit_difficulty(values: Floats) -> Floats:
    """Least-squares effect of each question ``(M,)`` in values = candidate + question + noise.

    ``values`` ``(C, M)`` is NaN where a candidate was not asked a question; the effect of a
    question that no candidate was asked is NaN. The questions' effects are eliminated from the
    normal equations, which leaves those of the candidates.
    """
    mask = np.isfinite(values).astype(float)
    filled = np.where(mask > 0, values, 0.0)
    counts = mask.sum(axis=0)
    shares = mask / np.maximum(counts, 1)
    system = np.diag(mask.sum(axis=1)) - shares @ mask.T
    sums = filled.sum(axis=1) - shares @ filled.sum(axis=0)
    # The mean of the candidates' effects is not determined: take the solution of least norm.
    effects = np.linalg.lstsq(system, sums, rcond=1e-9)[0]
    with np.errstate(invalid="ignore"):
        difficulty: Floats = (filled - mask * effects[:, None]).sum(axis=0) / counts
    return difficulty
