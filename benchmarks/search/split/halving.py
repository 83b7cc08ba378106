"""Successive halving over validation questions (Jamieson & Talwalkar 2016), and local search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.search.split.candidates import Family, neighbours, start_states
from offline_search.dataset import Split
from offline_search.evaluation.answers import Answers
from offline_search.evaluation.evaluator import EvaluationJob, RecordedEvaluator
from vllm_autoprune import PruningState

PARENTS = 3
"""Best states of a stage whose neighbours are tried in the next."""

Log = Callable[[str], None]


@dataclass(frozen=True)
class Score:
    """Accuracy at all budgets, then mean log-probability of the reference answers, for ties."""

    accuracy: float
    logprob: float

    @property
    def order(self) -> tuple[float, float]:
        """Sort key: a larger one is better."""
        return self.accuracy, self.logprob


class Measurement:
    """Answers of states to growing prefixes of the questions of a split."""

    def __init__(self, evaluator: RecordedEvaluator, split: Split, stops: Sequence[int]) -> None:
        """``stops`` are the numbers of questions of the stages, ascending."""
        self._evaluator, self._split = evaluator, split
        self._ranges = list(pairwise((0, *stops)))

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self._ranges)

    async def answers(self, state: PruningState | None, budget: int, stage: int) -> Answers:
        """The answers to all questions of the stages up to this one, counted from 0."""
        answers = Answers((), ())
        for start, stop in self._ranges[: stage + 1]:
            job = EvaluationJob(state, budget, self._split, start, stop)
            answers += await self._evaluator.evaluate(job)
        return answers

    async def score(self, state: PruningState, budgets: Sequence[int], stage: int) -> Score:
        """The score of a state, mean over budgets."""
        answers = Answers((), ())
        for budget in budgets:
            answers += await self.answers(state, budget, stage)
        count = len(answers)
        return Score(sum(answers.right) / count, sum(answers.logprob) / count)


async def halve(
    states: Iterable[PruningState], budgets: Sequence[int], measurement: Measurement, keep: int
) -> list[PruningState]:
    """The best states of the last stage, best first; each stage keeps one of ``keep``."""
    ranked = list({state.digest: state for state in states}.values())
    for stage in range(measurement.stages):
        scores = {one.digest: await measurement.score(one, budgets, stage) for one in ranked}
        ranked.sort(key=lambda one: scores[one.digest].order, reverse=True)
        if stage < measurement.stages - 1:
            ranked = ranked[: max(PARENTS, -(-len(ranked) // keep))]
    return ranked


async def search_family(
    family: Family, budget: int, measurement: Measurement, rounds: int, keep: int, log: Log
) -> list[PruningState]:
    """The best states of a family at K: a coarse grid, then the neighbours of the best."""
    states = start_states(family, budget)
    log(f"K = {budget}, {family}: {len(states)} states")
    best = await halve(states, [budget], measurement, keep)
    for number in range(rounds):
        near = [other for one in best[:PARENTS] for other in neighbours(one, family, budget)]
        log(f"K = {budget}, {family}, neighbours {number + 1}: {len(near)} states")
        best = await halve([*best[:PARENTS], *near], [budget], measurement, keep)
    return best
