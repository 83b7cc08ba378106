"""Answers of one policy to a sequence of examples, and the scores computed from them.

The objective is the mean log-probability of the reference answer minus that of the unpruned model
on the same examples, or MME's total minus the unpruned model's.
Both are means of one value for each example, so that candidates are compared in the same way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offline_search.settings import Settings
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.statistics import ClusterBootstrap, Estimate, Floats, estimate


@dataclass(frozen=True, slots=True)
class Answers:
    """Log-probability of each reference answer, and whether greedy decoding gives it."""

    logprob: tuple[float, ...]
    right: tuple[bool, ...]

    def __add__(self, other: Answers) -> Answers:
        return Answers(self.logprob + other.logprob, self.right + other.right)

    def __len__(self) -> int:
        return len(self.logprob)


NO_ANSWERS = Answers((), ())


def describe_objective(settings: Settings) -> str:
    """What the objective of a search is, with its unit."""
    unit = objective_unit(settings)
    if settings.objective == "mme":
        return f"MME's total less that of the model with all tokens, in {unit}"
    return f"mean log-probability of the reference answer less the full-token model's, in {unit}"


def objective_unit(settings: Settings) -> str:
    """The unit of the objective."""
    return "thousand points" if settings.objective == "mme" else "nats"


def relative_values(
    settings: Settings, examples: Sequence[Example], answers: Answers, full: Answers
) -> Floats:
    """Value of each answered example ``(M,)`` less that of the unpruned model; their mean counts.

    ``examples`` are those of the whole split.
    """
    if settings.objective == "mme":
        return relative_mme(examples, answers, full)
    return relative_logprob(answers, full)


def relative_logprob(answers: Answers, full: Answers) -> Floats:
    """Log-probability of each reference answer minus the unpruned model's, ``(M,)``."""
    count = len(answers)
    gaps: Floats = np.asarray(answers.logprob) - np.asarray(full.logprob[:count])
    return gaps


def relative_mme(examples: Sequence[Example], answers: Answers, full: Answers) -> Floats:
    """Contributions ``(M,)`` to MME's total less those of the unpruned model, in thousand points.

    ``examples`` are those of the whole split; their contributions have the total as their mean.
    """
    count = len(answers)
    own = _mme_contributions(examples, answers.right)
    gaps: Floats = own - _mme_contributions(examples, full.right[:count])
    return gaps


def _mme_contributions(examples: Sequence[Example], right: Sequence[bool]) -> Floats:
    """Share of each answered example in accuracy and accuracy+ of its category, in thousands.

    The examples that accuracy+ takes together count where all of them answered so far are right.
    """
    paired = {example.category for example in examples if example.pair is not None}
    questions = Counter(example.category for example in examples)
    keys = [
        None if one.pair is None and one.category in paired else (one.category, one.image, one.pair)
        for one in examples
    ]
    sizes = Counter(key for key in keys if key is not None)
    groups = Counter(category for category, *_ in sizes)
    wrong = {key for key, correct in zip(keys, right, strict=False) if not correct}
    values = []
    for example, key, correct in zip(examples, keys, right, strict=False):
        value = correct / questions[example.category]
        if key is not None and key not in wrong:
            value += 1 / (sizes[key] * groups[example.category])
        values.append(value)
    return len(examples) * np.asarray(values) / 10


def accuracy(answers: Answers) -> float:
    """Share of examples answered correctly by greedy decoding."""
    return sum(answers.right) / len(answers.right)


def accuracy_plus(examples: Sequence[Example], answers: Answers) -> float:
    """MME's accuracy+: share of pairs with both answers right, or of images without pairs."""
    groups: dict[tuple[str, int | str], bool] = {}
    paired = any(example.pair is not None for example in examples)
    for example, right in zip(examples, answers.right, strict=False):
        if paired and example.pair is None:
            continue
        key = (example.image, example.pair if example.pair is not None else "")
        groups[key] = groups.get(key, True) and right
    return sum(groups.values()) / len(groups) if groups else 0.0


def mme_total(examples: Sequence[Example], answers: Answers) -> float:
    """MME's total score: accuracy and accuracy+ of each category in per cent, summed."""
    total = 0.0
    for category in dict.fromkeys(example.category for example in examples):
        rows = [i for i, example in enumerate(examples) if example.category == category]
        part = Answers(
            tuple(answers.logprob[i] for i in rows), tuple(answers.right[i] for i in rows)
        )
        total += 100 * (accuracy(part) + accuracy_plus([examples[i] for i in rows], part))
    return total


def bootstrap_mean(examples: Sequence[Example], values: Floats) -> Estimate:
    """Mean with its 95 % bootstrap interval, clustered by image, rounded to six decimals."""
    bootstrap = ClusterBootstrap([example.image for example in examples])
    return estimate(bootstrap.mean(values)).rounded(6)


def paired_error(examples: Sequence[Example], gaps: Floats) -> float:
    """Standard error of the mean of paired differences ``(M,)``, clustered by image."""
    _, places = np.unique([example.image for example in examples[: len(gaps)]], return_inverse=True)
    sums = np.bincount(places, gaps - gaps.mean())
    if len(sums) < 2:
        return float("inf")
    return math.sqrt(len(sums) / (len(sums) - 1) * float(sums @ sums)) / len(gaps)


def significantly_below(examples: Sequence[Example], values: Floats, reference: Floats) -> bool:
    """Whether the paired mean difference to a reference is more than three standard errors below 0.

    Three instead of two, because a race tests every candidate several times. Never with fewer than
    four images.
    """
    gaps = values - reference[: len(values)]
    if len({example.image for example in examples[: len(gaps)]}) < 4:
        return False
    return bool(gaps.mean() + 3 * paired_error(examples, gaps) < 0)
