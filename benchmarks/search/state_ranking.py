"""Which state to ship: winners of searches compared with a baseline state, over several budgets.

Winners are ranked by the search and validation questions of a study. The best are then measured on
test questions, by which no search chose, and compared with the baseline by question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.common.progress import log_progress
from offline_search.candidates.selection_program import Candidate
from offline_search.dataset import Split
from offline_search.evaluation.answers import paired_error, relative_logprob
from offline_search.evaluation.evaluator import EvaluationJob, Evaluator
from offline_search.report.markdown import table
from vllm_autoprune.statistics import Floats
from vllm_autoprune.tpdsl.states.state import PruningState

RANKED_BY: tuple[Split, ...] = ("search", "validation")


async def rank_states(
    evaluator: Evaluator,
    confirming: Evaluator,
    states: Mapping[str, Candidate],
    baseline: PruningState,
    budgets: Sequence[int],
    count: int,
) -> str:
    """Table in Markdown of the baseline, then all states, best first.

    The baseline and the first ``count`` states are measured on the test split of ``confirming``.
    Objectives and accuracies are means over ``budgets``; the difference to the baseline has its
    95 % interval over images.
    """
    named = {baseline.name: baseline, **states}
    means: dict[str, float] = {}
    for name, state in named.items():
        values = [await _measure(evaluator, state, budgets, split) for split in RANKED_BY]
        means[name] = float(np.concatenate([objective for objective, _ in values]).mean())
        log_progress(f"{name}: {means[name]:+.3f}")
    ranked = [baseline.name, *sorted(states, key=lambda name: -means[name])]
    confirmed = {
        name: await _measure(confirming, named[name], budgets, "test")
        for name in ranked[: count + 1]
    }
    rows = []
    for name in ranked:
        row = [name, f"{means[name]:.3f}", "", "", ""]
        if name in confirmed:
            objective, right = confirmed[name]
            row[2:4] = f"{objective.mean():.3f}", f"{100 * right.mean():.1f}"
            gaps = objective - confirmed[baseline.name][0]
            error = 1.96 * paired_error(confirming.dataset.examples("test"), gaps)
            row[4] = "-" if name == baseline.name else f"{gaps.mean():+.3f} ± {error:.3f}"
        rows.append(row)
    less = f"less {baseline.name}, paired"
    head = ["state", "search and validation", "test", "accuracy %", less]
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
