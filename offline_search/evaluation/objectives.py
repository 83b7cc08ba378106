"""Objectives: the value of each example, objective vectors, and Pareto ranks.

All objectives are maximized; latency therefore counts as negative milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from offline_search.dataset import Example
from offline_search.evaluation.answers import (
    Answers,
    category_means,
    relative_logprob,
    relative_mme,
)
from offline_search.settings import Settings
from vllm_autoprune.statistics import Floats

ObjectiveVector = Mapping[str, float]
"""Value of each objective."""


def describe_objective(settings: Settings) -> str:
    """What the objective of a search is, with its unit."""
    unit = objective_unit(settings)
    if settings.scored_by_mme:
        return f"MME's total less that of the model with all tokens, in {unit}"
    return f"mean log-probability of the reference answer less the full-token model's, in {unit}"


def objective_unit(settings: Settings) -> str:
    """The unit of the objective."""
    return "thousand points" if settings.scored_by_mme else "nats"


def relative_values(
    settings: Settings, examples: Sequence[Example], answers: Answers, full: Answers
) -> Floats:
    """Value of each answered example ``(M,)`` less that of the unpruned model; their mean counts.

    ``examples`` are those of the whole split.
    """
    if settings.scored_by_mme:
        return relative_mme(examples, answers, full)
    return relative_logprob(answers, full)


def across_budgets(settings: Settings, values: Sequence[Floats]) -> Floats:
    """Values ``(M,)`` over several budgets: their mean, or those of the worst budget."""
    if settings.across == "worst":
        return min(values, key=lambda each: float(each.mean()))
    mean: Floats = np.mean(values, axis=0)
    return mean


def objective_vector(
    settings: Settings,
    examples: Sequence[Example],
    values: Mapping[int, Floats],
    objective: float,
    latency: float | None,
) -> dict[str, float]:
    """Objective vector of a candidate; empty in a single-objective search.

    ``values`` are relative values ``(M,)`` by budget, ``latency`` the milliseconds of one
    selection.
    """
    vector: dict[str, float] = {}
    if not settings.is_multi_objective:
        return vector
    if "quality" in settings.objectives:
        vector["quality"] = objective
    if settings.scored_by_mme:
        vector["mme"] = objective
    if "budgets" in settings.objectives:
        vector |= {f"K={budget}": round(float(each.mean()), 6) for budget, each in values.items()}
    if "tasks" in settings.objectives:
        mean: Floats = sum(values.values()) / len(values)  # type: ignore[assignment]
        vector |= category_means(examples, mean)
    if latency is not None:
        vector["latency"] = -latency
    return vector


def dominates(one: ObjectiveVector, other: ObjectiveVector) -> bool:
    """Pareto dominance: at least as good in every objective, and better in one."""
    return all(one[name] >= other[name] for name in other) and any(
        one[name] > other[name] for name in other
    )


def pareto_ranks(vectors: Sequence[ObjectiveVector]) -> list[int]:
    """Non-dominated sorting: 0 for the Pareto front, 1 for the front of the rest, and so on."""
    ranks = [-1] * len(vectors)
    unranked = list(range(len(vectors)))
    rank = 0
    while unranked:
        for index in [
            i for i in unranked if not any(dominates(vectors[j], vectors[i]) for j in unranked)
        ]:
            ranks[index] = rank
        unranked = [index for index in unranked if ranks[index] < 0]
        rank += 1
    return ranks
