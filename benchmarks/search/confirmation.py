"""Winners of a comparison, measured once more on more questions of the test split.

The test split of a comparison is small, because every search measures its winner on it. Those
questions are the first of the ones here, so the two are not independent; no winner was chosen by
any of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.common.progress import log_progress
from benchmarks.search.comparison_table import format_mean
from benchmarks.search.results import read_results, require_model, search_name
from offline_search.candidates.selection_program import Candidate
from offline_search.evaluation.answers import Answers, relative_logprob
from offline_search.evaluation.evaluator import EvaluationJob, Evaluator
from offline_search.report.markdown import table
from offline_search.settings import FrozenModel

FILE = "confirmation.json"


class Confirmed(FrozenModel):
    """One winner: mean objective over the budgets of its search, and accuracy."""

    questions: int
    evaluator: str
    digest: str
    objective: float
    accuracy: float


_CONFIRMED: TypeAdapter[dict[str, Confirmed]] = TypeAdapter(dict[str, Confirmed])


def read_confirmation(folder: Path) -> dict[str, Confirmed]:
    """What was measured so far, by name of the search."""
    path = folder / FILE
    return _CONFIRMED.validate_json(path.read_bytes()) if path.exists() else {}


async def _measure(
    evaluator: Evaluator, winner: Candidate, budgets: Sequence[int], full: Answers
) -> Confirmed:
    count = len(evaluator.dataset.examples("test"))
    answers = [
        await evaluator.evaluate(EvaluationJob(winner, budget, "test", 0, count))
        for budget in budgets
    ]
    means = [float(relative_logprob(each, full).mean()) for each in answers]
    right = sum(sum(each.right) for each in answers)
    return Confirmed(
        questions=count,
        evaluator=evaluator.name,
        digest=winner.digest,
        objective=round(sum(means) / len(means), 6),
        accuracy=round(right / (count * len(budgets)), 6),
    )


def confirm(folder: Path, evaluator: Evaluator) -> dict[str, Confirmed]:
    """Measure every winner that was not measured yet; the file is written after each.

    Raises :class:`SearchError` for a search on another model than the evaluator's.
    """
    confirmed = read_confirmation(folder)
    count = len(evaluator.dataset.examples("test"))
    full: Answers | None = None
    for name, result in read_results(folder).items():
        require_model(result, evaluator.name)
        known, winner = confirmed.get(name), result.winner
        if winner is None:
            continue
        if known and (known.digest, known.evaluator) == (winner.digest, evaluator.name):
            continue
        if full is None:
            full = asyncio.run(evaluator.evaluate(EvaluationJob(None, 0, "test", 0, count)))
        measured = _measure(evaluator, winner.load(), result.settings.budgets, full)
        confirmed[name] = asyncio.run(measured)
        log_progress(f"{name}: {confirmed[name].objective:+.4f}")
        (folder / FILE).write_bytes(_CONFIRMED.dump_json(confirmed, indent=1))
    return confirmed


def as_markdown(
    folder: Path, strategies: Sequence[str], seeds: Sequence[int], reference: str = ""
) -> str:
    """Confirmed objective and accuracy of each strategy, and paired differences to one of them.

    The reference is the last strategy by default.
    """
    confirmed = read_confirmation(folder)
    objectives = {
        strategy: {
            seed: confirmed[name]
            for seed in seeds
            if (name := search_name(strategy, seed)) in confirmed
        }
        for strategy in strategies
    }
    reference = reference or strategies[-1]
    head = ["strategy", "seeds", "objective", "accuracy %", f"less {reference}, paired by seed"]
    rows = []
    for strategy, own in objectives.items():
        if not own:
            continue
        shared = [seed for seed in own if seed in objectives[reference]]
        gaps = [own[seed].objective - objectives[reference][seed].objective for seed in shared]
        rows.append([
            strategy,
            str(len(own)),
            format_mean([one.objective for one in own.values()], 2),
            format_mean([100 * one.accuracy for one in own.values()], 1),
            format_mean(gaps, 2) if gaps and strategy != reference else "-",
        ])  # fmt: skip
    questions = {one.questions for one in confirmed.values()}
    note = f"{', '.join(map(str, sorted(questions)))} questions; \u00b1 is Student's t over seeds."
    return "\n".join([*table(head, rows, "lrrrr"), "", note]) + "\n"
