"""Answers of a yardstick by case: which questions it answers right with which tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from benchmarks.common.report import log_progress
from benchmarks.yardsticks.examples import Example
from benchmarks.yardsticks.yardstick import Case, Scores, Yardstick
from vllm_autoprune.statistics import Floats

CaseKey = tuple[str, str]
"""Name of a case, and the label of its budget."""


def score_cases(
    yardstick: Yardstick, cases: Sequence[Case], examples: Sequence[Example]
) -> dict[CaseKey, list[Scores]]:
    """Scores of every case on all ``examples``, batch by batch, in their order."""
    scores: dict[CaseKey, list[Scores]] = {
        (case.name, case.budget.label): [] for case in cases
    }
    log_progress(f"{len(cases)} cases on {yardstick.name}")
    done = 0
    for batch in yardstick.batches(examples):
        encoded = yardstick.encode(batch)
        for case in cases:
            scores[case.name, case.budget.label].append(encoded.score(case))
        done += len(batch)
        log_progress(f"{yardstick.name}: {done} of {len(examples)} questions")
    return scores


def join_rights(scores: Mapping[CaseKey, Sequence[Scores]]) -> dict[CaseKey, Floats]:
    """Of every case 1 for each question that is answered right, else 0: ``(M,)``."""
    return {
        key: torch.cat([batch.correct for batch in batches]).double().numpy()
        for key, batches in scores.items()
    }
