"""Comparisons of completions for the checks: the first difference, or the empty string."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from vllm_autoprune.selftest.report import Completion, Report

BLOCK = 32
"""Tokens of one block of the prefix cache."""

TOLERANCE = 2e-2
"""Difference of log-probabilities in half precision that counts as equal."""

_HYBRID_TOLERANCE = 0.1
"""The same with linear attention, where a token alone and one of many are computed by different
kernels: 0.04 was measured."""


def choose_tolerance(report: Report) -> float:
    """Difference of log-probabilities that counts as equal for a report's model."""
    return _HYBRID_TOLERANCE if report.hybrid else TOLERANCE


def remaining_indices(stock: list[int], pruned: list[int], kept: list[list[int]]) -> list[int]:
    """Indices into the stock prompt of the tokens that remain."""
    (image,) = Counter(stock) - Counter(pruned)
    indices: list[int] = []
    at, rows = 0, iter(kept)
    while at < len(stock):
        if stock[at] != image:
            indices.append(at)
            at += 1
            continue
        indices += [at + row for row in next(rows)]
        while at < len(stock) and stock[at] == image:
            at += 1
    return indices


def count_between(prompt: list[int], image: int) -> list[int]:
    """How many image tokens stand before, between and after the other tokens of a prompt."""
    counts = [0]
    for token in prompt:
        if token == image:
            counts[-1] += 1
        else:
            counts.append(0)
    return counts


def describe_difference(one: Completion, other: Completion, tolerance: float = TOLERANCE) -> str:
    """The first difference between two completions, or the empty string."""
    if one.prompt != other.prompt:
        return "another prompt"
    if one.ids != other.ids:
        return f"another answer, {one.ids} and {other.ids}"
    if not abs(one.logprob - other.logprob) <= tolerance:  # NaN is not equal either
        return f"log-probabilities {one.logprob} and {other.logprob}"
    return ""


def first_change(
    completions: Mapping[str, Completion],
    expected: Mapping[str, Completion],
    tolerance: float = TOLERANCE,
) -> str:
    """The first completion that differs from the expected one, or whose positions do."""
    for name, one in completions.items():
        wrong = describe_difference(one, expected[name], tolerance)
        if wrong or one.positions != expected[name].positions:
            return f"{name}: {wrong or f'positions {one.positions}'}"
    return ""


def first_failure(
    completions: Mapping[str, Completion], holds: Callable[[str, Completion], bool], wrong: str
) -> str:
    """The first completion for which a condition does not hold."""
    failed = (name for name, one in completions.items() if not holds(name, one))
    return next((f"{name}: {wrong}" for name in failed), "")
