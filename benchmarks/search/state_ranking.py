"""Which state to ship: winners of searches beside a known state, over several budgets.

Winners are ranked by the search and validation questions of a study. The best are then measured on
fresh questions, on which nothing was chosen, and compared with the known state by question.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.common.progress import log_progress
from offline_search.candidates.selection_program import Candidate
from offline_search.dataset import Split
from offline_search.evaluation.answers import relative_logprob
from offline_search.evaluation.evaluator import EvaluationJob, Evaluator
from offline_search.report.markdown import table
from vllm_autoprune.statistics import Floats

RANKED_BY: tuple[Split, ...] = ("search", "validation")


async def rank_states(
    evaluator: Evaluator,
    fresh: Evaluator,
    states: Mapping[str, Candidate],
    known: Candidate,
    budgets: Sequence[int],
    count: int,
) -> str:
    """Table in Markdown of all states, best first; the first ``count`` on the ``fresh`` test split.

    Objectives and accuracies are means over ``budgets``; the difference to ``known`` has its 95 %
    interval over questions.
    """
    named = {"known": known, **states}
    means: dict[str, float] = {}
    for name, state in named.items():
        values = [await _measure(evaluator, state, budgets, split) for split in RANKED_BY]
        means[name] = float(np.concatenate([objective for objective, _ in values]).mean())
        log_progress(f"{name}: {means[name]:+.3f}")
    own, _ = await _measure(fresh, known, budgets, "test")
    ranked = sorted(states, key=lambda name: -means[name])
    rows = []
    for name in ["known", *ranked]:
        row = [name, f"{means[name]:.3f}", "", "", ""]
        if name in ["known", *ranked[:count]]:
            objective, right = await _measure(fresh, named[name], budgets, "test")
            gaps = objective - own
            error = 1.96 * float(gaps.std(ddof=1)) / math.sqrt(len(gaps))
            less = "-" if name == "known" else f"{gaps.mean():+.3f} ± {error:.3f}"
            row[2:] = [f"{objective.mean():.3f}", f"{100 * right.mean():.1f}", less]
        rows.append(row)
    head = ["state", "search and validation", "fresh", "accuracy %", "less known, paired"]
    return "\n".join(table(head, rows, "lrrrr")) + "\n"


async def _measure(
    evaluator: Evaluator, state: Candidate, budgets: Sequence[int], split: Split
) -> tuple[Floats, Floats]:
    """Objective and correctness ``(M,)`` of each question, mean over the budgets."""
    count = len(evaluator.dataset.examples(split))
    full = await evaluator.evaluate(EvaluationJob(None, 0, split, 0, count))
    answers = [
        await evaluator.evaluate(EvaluationJob(state, budget, split, 0, count))
        for budget in budgets
    ]
    objective: Floats = np.mean([relative_logprob(each, full) for each in answers], axis=0)
    right: Floats = np.mean([each.right for each in answers], axis=0)
    return objective, right
