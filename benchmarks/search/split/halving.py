"""Successive halving over validation questions (Jamieson & Talwalkar 2016), and local search."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from offline_search.dataset import Split
from offline_search.evaluation.answers import Answers
from offline_search.evaluation.evaluator import EvaluationJob, RecordedEvaluator
from vllm_autoprune import PruningState

PARENTS = 3
"""Best states of a stage whose neighbours are tried in the next."""

Log = Callable[[str], None]

Near = Callable[[PruningState], Sequence[PruningState]]
"""state -> states that differ from it in one choice."""


@dataclass(frozen=True)
class Effort:
    """Stages of halving, of which each keeps one state of ``keep``; rounds of neighbours."""

    stages: int
    keep: int
    rounds: int


class Measurement:
    """Answers of states to growing prefixes of the questions of a split."""

    def __init__(self, evaluator: RecordedEvaluator, split: Split, stops: Sequence[int]) -> None:
        """``stops`` are the numbers of questions of the stages, ascending."""
        self._evaluator, self._split = evaluator, split
        self._ranges = list(pairwise((0, *stops)))

    async def answers(self, state: PruningState | None, budget: int, stage: int) -> Answers:
        """The answers to all questions of the stages up to this one, counted from 0."""
        answers = Answers((), ())
        for start, stop in self._ranges[: stage + 1]:
            job = EvaluationJob(state, budget, self._split, start, stop)
            answers += await self._evaluator.evaluate(job)
        return answers

    async def accuracy(self, state: PruningState, budget: int, stage: int) -> float:
        """The share of right answers."""
        answers = await self.answers(state, budget, stage)
        return sum(answers.right) / len(answers)


Score = tuple[float, float]
"""Sort key of a state: a larger one is better; the second decides between equal first ones."""

Judge = Callable[[PruningState, int], Awaitable[Score]]
"""(state, stage) -> score."""


def judge_at(measurement: Measurement, budget: int) -> Judge:
    """Accuracy at K; the log-probability of the reference answers decides ties."""

    async def judge(state: PruningState, stage: int) -> Score:
        answers = await measurement.answers(state, budget, stage)
        return sum(answers.right) / len(answers), sum(answers.logprob) / len(answers)

    return judge


def judge_worst(measurement: Measurement, references: Mapping[int, PruningState]) -> Judge:
    """The smallest gain in accuracy over a reference state by K; the mean gain decides ties."""

    async def judge(state: PruningState, stage: int) -> Score:
        gains = [
            await measurement.accuracy(state, budget, stage)
            - await measurement.accuracy(reference, budget, stage)
            for budget, reference in references.items()
        ]
        return min(gains), sum(gains) / len(gains)

    return judge


async def halve(states: Iterable[PruningState], judge: Judge, effort: Effort) -> list[PruningState]:
    """The best states of the last stage, best first."""
    ranked = list({state.digest: state for state in states}.values())
    for stage in range(effort.stages):
        scores = {one.digest: await judge(one, stage) for one in ranked}
        ranked.sort(key=lambda one: scores[one.digest], reverse=True)
        if stage < effort.stages - 1:
            ranked = ranked[: max(PARENTS, -(-len(ranked) // effort.keep))]
    return ranked


async def climb(
    states: Sequence[PruningState], near: Near, judge: Judge, effort: Effort, log: Log
) -> list[PruningState]:
    """The best of some states, then of their neighbours, round by round."""
    log(f"{len(states)} states")
    best = await halve(states, judge, effort)
    for number in range(effort.rounds):
        others = [other for one in best[:PARENTS] for other in near(one)]
        log(f"{len(others)} neighbours, round {number + 1}")
        best = await halve([*best[:PARENTS], *others], judge, effort)
    return best
