"""Winners of a comparison, measured once more on more questions of the test split.

The test split of a comparison is small, because every search measures its winner on it. Those
questions are the first of the ones here, so the two are not independent; no winner was chosen by
any of them.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import Field, TypeAdapter

from benchmarks.common.report import log_progress
from benchmarks.search.comparison_table import format_mean, t_quantile
from benchmarks.search.results import read_results, require_model, search_name
from offline_search.components import Candidate
from offline_search.evaluator import EvaluationJob, Evaluator
from offline_search.history import Answers, relative_logprob
from offline_search.report import table
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.tpdsl.state import PruningState

FILE = "confirmation.json"

BASE = "base policy"
"""Name of the base policy alone among what was measured."""

_BLOCKS = 24
"""Blocks of questions whose means are kept, for intervals over questions."""


class Confirmed(FrozenModel):
    """One winner or state: mean objective over its budgets, and accuracy."""

    questions: int
    evaluator: str
    digest: str
    objective: float
    accuracy: float
    blocks: tuple[float, ...] = Field(
        default=(),
        exclude_if=lambda blocks: not blocks,
        description="mean objective of each of several equal blocks of the questions",
    )


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
    objective = np.mean([relative_logprob(each, full) for each in answers], axis=0)
    right = sum(sum(each.right) for each in answers)
    return Confirmed(
        questions=count,
        evaluator=evaluator.name,
        digest=winner.digest,
        objective=round(float(objective.mean()), 6),
        accuracy=round(right / (count * len(budgets)), 6),
        blocks=tuple(
            round(float(block.mean()), 4)
            for block in np.array_split(objective, min(_BLOCKS, count))
        ),
    )


def confirm(
    folder: Path, evaluator: Evaluator, states: Mapping[str, PruningState] | None = None
) -> dict[str, Confirmed]:
    """Measure what was not measured yet, every winner and other ``states`` at their own K.

    The file is written after each. Raises :class:`SearchError` for a search on another model than
    the evaluator's.
    """
    confirmed = read_confirmation(folder)
    count = len(evaluator.dataset.examples("test"))
    full: Answers | None = None
    candidates: dict[str, tuple[Candidate, Sequence[int]]] = {
        name: (state, state.budget.range()[:1]) for name, state in (states or {}).items()
    }
    for name, result in read_results(folder).items():
        require_model(result, evaluator.name)
        if result.winner is not None:
            candidates[name] = result.winner.load(), result.settings.budgets
    for name, (winner, budgets) in candidates.items():
        known = confirmed.get(name)
        if known and (known.digest, known.evaluator) == (winner.digest, evaluator.name):
            continue
        if full is None:
            full = asyncio.run(evaluator.evaluate(EvaluationJob(None, 0, "test", 0, count)))
        measured = _measure(evaluator, winner, budgets, full)
        confirmed[name] = asyncio.run(measured)
        log_progress(f"{name}: {confirmed[name].objective:+.4f}")
        (folder / FILE).write_bytes(_CONFIRMED.dump_json(confirmed, indent=1))
    return confirmed


def as_markdown(
    folder: Path, strategies: Sequence[str], seeds: Sequence[int], reference: str = ""
) -> str:
    """Confirmed objective and accuracy of each strategy, and paired differences to one of them.

    The reference is the last strategy by default. Differences to the base policy follow where it
    was measured.
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
    base = confirmed.get(BASE)
    head += [f"less {BASE}"] if base else []
    rows = []
    for strategy, own in objectives.items():
        if not own:
            continue
        others = objectives[reference]
        pairs = [(own[seed], others[seed]) for seed in own if seed in others]
        rows.append([
            strategy,
            str(len(own)),
            format_mean([one.objective for one in own.values()], 2),
            format_mean([100 * one.accuracy for one in own.values()], 1),
            format_difference(pairs) if pairs and strategy != reference else "-",
            *([format_difference([(one, base) for one in own.values()])] if base else []),
        ])  # fmt: skip
    questions = {one.questions for one in confirmed.values()}
    note = f"{', '.join(map(str, sorted(questions)))} questions; \u00b1 is Student's t over seeds"
    note += ", in differences over questions as well." if base else "."
    return "\n".join([*table(head, rows, "lrrrrr"[: len(head)]), "", note]) + "\n"


def states_as_markdown(folder: Path, names: Iterable[str]) -> str:
    """Confirmed objective and accuracy of single states, and differences to the base policy."""
    confirmed = read_confirmation(folder)
    rows = [
        [
            name,
            f"{row.objective:.2f}",
            f"{100 * row.accuracy:.1f}",
            format_difference([(row, base)]),
        ]
        for name in names
        if (row := confirmed.get(name)) and (base := confirmed.get(BASE))
    ]
    head = ["state", "objective", "accuracy %", f"less {BASE}"]
    return "\n".join(table(head, rows, "lrrr")) + "\n"


def format_difference(pairs: Sequence[tuple[Confirmed, Confirmed]]) -> str:
    """Mean difference over pairs, one a seed, with its 95 % interval over seeds and questions.

    The variance of the mean is bounded by the sum of those over seeds and over blocks of questions
    (two crossed random effects, whose residual counts twice), and Student's t has the fewer degrees
    of freedom of the two. An effect with a single level is left out, as questions without blocks.
    """
    by_seed = [winner.objective - other.objective for winner, other in pairs]
    blocks = [np.subtract(a.blocks, b.blocks) for a, b in pairs if a.blocks and b.blocks]
    by_block = np.mean(blocks, axis=0).tolist() if blocks else []
    mean = statistics.mean(by_seed)
    effects = [effect for effect in (by_seed, by_block) if len(effect) > 1]
    if not effects:
        return f"{mean:.2f}"
    variance = sum(statistics.variance(effect) / len(effect) for effect in effects)
    width = t_quantile(min(map(len, effects)) - 1) * math.sqrt(variance)
    return f"{mean:.2f} ± {width:.2f}"
