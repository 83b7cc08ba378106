"""One round of candidates tried: judged, told apart by behaviour, measured together.

Knows nothing about where candidates come from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from offline_search.answers import (
    NONE,
    Answers,
    Floats,
    accuracy,
    accuracy_plus,
    by_category,
    relative,
    surely_below,
)
from offline_search.evaluators.protocol import EvaluationFailed, Job
from offline_search.examples import Example
from offline_search.history import History, Trial
from offline_search.judge import Probes, judge
from offline_search.ledger import Ledger
from offline_search.measuring import Measuring
from offline_search.objectives import axes
from offline_search.proposal import Draft
from offline_search.records import Judged, Proposed, Status, Tried
from offline_search.settings import Settings
from vllm_autoprune.tpdsl.states.state import PruningState

RUNGS = (0.125, 0.5, 1.0)
"""Shares of the search split after which a race drops who is surely behind."""


@dataclass
class Tally:
    """Answers of one state so far, by budget."""

    budgets: Sequence[int]
    full: Answers
    answers: dict[int, Answers] = field(default_factory=dict)

    def add(self, budget: int, answers: Answers) -> None:
        """Answers to the examples that follow those there are."""
        self.answers[budget] = self.answers.get(budget, NONE) + answers

    def values(self, budget: int) -> Floats:
        """Log-probabilities relative to all tokens at one budget."""
        return relative(self.answers[budget], self.full)

    def mean(self) -> Floats:
        """Their mean over the budgets, example by example."""
        mean: Floats = np.mean([self.values(budget) for budget in self.budgets], axis=0)
        return mean

    def objective(self, across: str) -> float:
        """One figure: the mean over budgets, or the worst of them."""
        each = [float(self.values(budget).mean()) for budget in self.budgets]
        return round(min(each) if across == "worst" else sum(each) / len(each), 6)

    def spent(self) -> int:
        """Answers that were paid for."""
        return sum(map(len, self.answers.values()))


class Trying:
    """Turns drafts into trials, each step of them in the ledger."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        measuring: Measuring,
        examples: Sequence[Example],
        probes: Probes,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._measuring = measuring
        self._examples = examples
        self._probes = probes
        self._full = NONE
        self._behaves: dict[str, str] = {}

    async def begin(self, base: PruningState) -> History:
        """The full-token model and the base policy alone: what everything is held against."""
        self._full = await self._measuring.answers(Job(None, 0, "search", 0, len(self._examples)))
        tally = Tally(self._settings.budgets, self._full)
        await self._answer(base, tally, 0, len(self._examples))
        verdict = self._judged(base)
        self._behaves |= {base.digest: "base", verdict.behaviour or base.digest: "base"}
        alone = Proposed(round=0, index=0, origin="base policy", digest=base.digest)
        tried = self._tried(alone, "evaluated", tally)
        return History(tried, tally.mean())

    def tell_apart(self, trials: Sequence[Trial]) -> None:
        """Take note of behaviours that are known."""
        for trial in trials:
            if trial.state is not None and trial.tried.status in ("evaluated", "dropped"):
                for key in self._keys(trial.state):
                    self._behaves.setdefault(key, trial.name)

    async def round(
        self, drafts: Sequence[Draft], number: int, history: History, race: bool
    ) -> list[Trial]:
        """The trials of one round, in the order of the drafts; its measurements run at once."""
        proposed = [
            self._ledger.put(_proposed(draft, number, index)) for index, draft in enumerate(drafts)
        ]
        settled: dict[int, Tried] = {}
        running: dict[int, PruningState] = {}
        for index, draft in enumerate(drafts):
            verdict = self._first_look(proposed[index], draft)
            if isinstance(verdict, Tried):
                settled[index] = verdict
            else:
                running[index] = verdict
        tallies = {index: Tally(self._settings.budgets, self._full) for index in running}
        begin = 0
        # Who is behind in one objective may lead in another: with several nobody is dropped.
        for share in RUNGS if race and not self._settings.several else (1.0,):
            stop = self._rung(share)
            failed = await self._all(running, tallies, begin, stop)
            for index, reason in failed.items():
                self._forget(running.pop(index), proposed[index].name)
                settled[index] = self._tried(
                    proposed[index], "unevaluated", tallies[index], reason=reason
                )
            for index in [i for i in running if stop < len(self._examples)]:
                if surely_below(self._examples, tallies[index].mean(), history.rival()):
                    del running[index]
                    reason = f"behind after {stop} of {len(self._examples)} examples"
                    settled[index] = self._tried(
                        proposed[index], "dropped", tallies[index], reason=reason
                    )
            begin = stop
        for index in running:
            settled[index] = self._tried(proposed[index], "evaluated", tallies[index])
        trials = []
        for index, draft in enumerate(drafts):
            tried = self._ledger.put(settled[index])
            tally = tallies.get(index)
            values = tally.mean() if tally is not None and tally.spent() else None
            trials.append(Trial(proposed[index], tried, draft.state, values))
        self.tell_apart(trials)
        return trials

    def _rung(self, share: float) -> int:
        return max(1, round(share * len(self._examples)))

    def _first_look(self, proposed: Proposed, draft: Draft) -> PruningState | Tried:
        """The state to measure, or what there is to say without measuring it."""
        if draft.state is None:
            reason = proposed.problems[0] if proposed.problems else "no state"
            return self._tried(proposed, "invalid", reason=reason)
        state = draft.state
        if state.digest in self._behaves:
            return self._tried(proposed, "same", same_as=self._behaves[state.digest])
        verdict = self._judged(state)
        if not verdict.valid:
            return self._tried(proposed, "unsafe", reason=verdict.problems[0])
        known = verdict.behaviour and self._behaves.get(verdict.behaviour)
        if known:
            self._behaves[state.digest] = known
            return self._tried(proposed, "same", same_as=known)
        # Noted before it is measured: the next draft of this very round may be the same.
        for key in self._keys(state):
            self._behaves[key] = proposed.name
        return state

    def _forget(self, state: PruningState, name: str) -> None:
        """What could not be measured is nothing that others could be the same as."""
        for key in self._keys(state):
            if self._behaves.get(key) == name:
                del self._behaves[key]

    def _keys(self, state: PruningState) -> list[str]:
        verdict = self._judged(state)
        return [key for key in (state.digest, verdict.behaviour) if key]

    def _judged(self, state: PruningState) -> Judged:
        known = self._ledger.find(Judged, f"verdict/{state.digest}")
        return known or self._ledger.put(judge(state, self._settings, self._probes))

    async def _all(
        self, running: dict[int, PruningState], tallies: dict[int, Tally], start: int, stop: int
    ) -> dict[int, str]:
        """Measure all that run on the next examples; the reasons of those that failed."""
        asked = [self._answer(state, tallies[i], start, stop) for i, state in running.items()]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        failed: dict[int, str] = {}
        for index, outcome in zip(running, outcomes, strict=True):
            if isinstance(outcome, EvaluationFailed):
                failed[index] = str(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        return failed

    async def _answer(self, state: PruningState, tally: Tally, start: int, stop: int) -> None:
        budgets = self._settings.budgets
        jobs = [Job(state, budget, "search", start, stop) for budget in budgets]
        found = await asyncio.gather(*(self._measuring.answers(job) for job in jobs))
        for budget, answers in zip(budgets, found, strict=True):
            tally.add(budget, answers)

    def _tried(
        self,
        proposed: Proposed,
        status: Status,
        tally: Tally | None = None,
        *,
        same_as: str = "",
        reason: str = "",
    ) -> Tried:
        figures: dict[str, Any] = {}
        if tally is not None and tally.answers and status != "unevaluated":
            answers = [tally.answers[budget] for budget in self._settings.budgets]
            figures = {
                "objective": tally.objective(self._settings.across),
                "accuracy": _mean([accuracy(each) for each in answers]),
                "accuracy_plus": _mean([accuracy_plus(self._examples, each) for each in answers]),
                "by_category": by_category(self._examples, tally.mean()),
            }
        if tally is not None and status == "evaluated":
            figures["axes"] = self._axes(proposed.digest, tally)
        return Tried(
            round=proposed.round,
            index=proposed.index,
            status=status,
            same_as=same_as,
            reason=reason[:500],
            examples=0 if tally is None else tally.spent(),
            **figures,
        )

    def _axes(self, digest: str, tally: Tally) -> dict[str, float]:
        verdict = self._ledger.find(Judged, f"verdict/{digest}")
        latency = None if verdict is None else verdict.latency
        settings = self._settings
        values = {budget: tally.values(budget) for budget in settings.budgets}
        objective = tally.objective(settings.across)
        return axes(settings, self._examples, values, objective, latency)


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 6)


def _proposed(draft: Draft, number: int, index: int) -> Proposed:
    state = draft.state
    return Proposed(
        round=number,
        index=index,
        origin=draft.origin,
        parents=draft.parents,
        state=None if state is None else state.model_dump(mode="json", exclude={"provenance"}),
        digest="" if state is None else state.digest,
        problems=tuple(str(problem)[:500] for problem in draft.problems[:8]),
        program=draft.program,
    )
