"""Evaluation of one round of candidates: safety check, duplicate detection, early stopping."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np

from offline_search.candidates import BASE_PARENT, Draft
from offline_search.dataset import cut_blocks
from offline_search.differences import Difference, compare
from offline_search.evaluator import EvaluationJob, RecordedEvaluator
from offline_search.history import Answers, History, Trial, rounded_mean
from offline_search.ledger import (
    Ledger,
    ProposalRecord,
    Status,
    TrialRecord,
    VerdictRecord,
)
from offline_search.models import ModelScales
from offline_search.probes import Probes, count_exchanges, fingerprint
from offline_search.schedule import RACING_ERRORS, RACING_STAGES, count_of_share
from offline_search.settings import Settings
from vllm_autoprune.errors import AutopruneError, EvaluationFailed
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.statistics import Floats
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.materialize import PruningPolicy, materialize
from vllm_autoprune.tpdsl.safety import safety_check
from vllm_autoprune.tpdsl.state import PruningState


@dataclass
class _Candidate:
    """A candidate during a round, with its answers by budget; with a result, it is finished."""

    proposal: ProposalRecord
    state: PruningState | None
    answers: list[Answers] = field(default_factory=list)
    result: TrialRecord | None = None


@dataclass
class _Reference(_Candidate):
    """An earlier trial that is asked a round's questions, to compare candidates with it.

    It is a leader, or the parent of ``children`` that have a hypothesis about the difference.
    """

    is_leader: bool = False
    children: list[_Candidate] = field(default_factory=list)

    @property
    def is_needed(self) -> bool:
        """Whether a candidate is still compared with it."""
        return self.is_leader or bool(_unfinished(self.children))


class _Race(NamedTuple):
    """What candidates of a round are compared with after a part of its questions.

    ``leader_values`` ``(M,)`` are those of the leader before the round.
    """

    leader: str
    leader_values: Floats
    resolution: float
    decimals: int

    def describe(self, gap: Difference, questions: int) -> str:
        """Difference of a dropped candidate from the one that it was compared with."""
        error = "unknown"
        if math.isfinite(gap.error):
            error = f"{gap.error:.{self.decimals}f}"
        value = f"{gap.value:+z.{self.decimals}f}"
        return f"{value} ± {error} on the same {questions} questions"


@dataclass
class RoundEvaluator:
    """Turns the drafts of a round into trials, and records every step in the ledger."""

    settings: Settings
    ledger: Ledger
    evaluator: RecordedEvaluator
    examples: Sequence[Example]
    probes: Probes
    scales: ModelScales = field(default_factory=ModelScales)
    """Scales of the models, which are measured with the base policy."""
    _full: Answers = field(default_factory=Answers)
    """Answers of the unpruned model to the questions of the round."""
    _name_of: dict[str, str] = field(default_factory=dict)
    """Name of the candidate that was measured, by its digest or selection fingerprint."""
    _block: slice = field(default_factory=lambda: slice(0))
    """Range of the round's questions among ``examples``."""

    def __post_init__(self) -> None:
        # Several models are asked in turn; no block asks one of them more than another.
        models = max(len(self.settings.models), 1)
        images = [example.image for example in self.examples[::models]]
        self.blocks = [
            slice(models * block.start, models * block.stop)
            for block in cut_blocks(images, self.settings.block)
        ]

    @property
    def _questions(self) -> Sequence[Example]:
        """The questions of the round."""
        return self.examples[self._block]

    async def evaluate_baselines(self, base: PruningState) -> History:
        """Measure the unpruned model and the base policy; returns the initial history H_0."""
        proposal = ProposalRecord(
            round=0, index=0, origin="base policy", digest=base.digest
        )
        candidate = await self._open_block(1, proposal, base)
        self.scales = ModelScales.measure(self._questions, self._values(candidate))
        for key in (base.digest, self._fingerprint(base)):
            self._name_of[key] = BASE_PARENT
        names_bases = bool(self.settings.proposer and self.settings.bases)
        return History(self._finish(candidate), [], self.examples, names_bases)

    async def _open_block(
        self, number: int, proposal: ProposalRecord, base: PruningState | None
    ) -> _Candidate:
        """Ask the unpruned model and the base policy the questions of a round."""
        self._block = self.blocks[(number - 1) % len(self.blocks)]
        job = EvaluationJob(None, 0, "search", self._block.start, self._block.stop)
        self._full = await self.evaluator.evaluate(job)
        candidate = _Candidate(proposal, base)
        await self._measure(candidate, 0, len(self._questions))
        return candidate

    async def evaluate_round(
        self,
        drafts: Sequence[Draft],
        number: int,
        history: History,
        early_stopping: bool,
    ) -> list[Trial]:
        """The trials of one round in the order of its drafts; states are measured concurrently.

        Leaders, and parents of candidates with a hypothesis, are asked fresh questions too.
        """
        base = await self._open_block(number, history.base.proposal, history.base.state)
        history.add_values(BASE_PARENT, self._block, self._values(base))
        candidates = [
            self._record_proposal(draft, number, index)
            for index, draft in enumerate(drafts)
        ]
        for candidate in candidates:
            candidate.result = self._screen(candidate)
        leader = history.leader().name
        references = self._find_references(candidates, history)
        start = 0
        for share, divisor in RACING_STAGES if early_stopping else RACING_STAGES[-1:]:
            stop = count_of_share(share, len(self._questions))
            references = [
                reference
                for reference in _unfinished(references)
                if reference.is_needed
            ]
            await self._measure_all(
                [*_unfinished(candidates), *references], start, stop
            )
            for reference in _unfinished(references):
                name = reference.proposal.name
                history.add_values(name, self._block, self._values(reference))
                history.answers += (stop - start) * len(self.settings.budgets)
            if stop < len(self._questions):
                values = history.values_of(leader)
                assert values is not None, "a leader was measured"
                race = _Race(
                    leader,
                    values[self._block][:stop],
                    history.resolution,
                    history.count_decimals(),
                )
                self._drop_losers(candidates, race, divisor)
            start = stop
        self._forget_failures(candidates)
        trials = [self._finish(candidate) for candidate in candidates]
        for trial in trials:
            self.ledger.put(trial.result)
        history.trials += trials
        history.answers += sum(trial.result.examples for trial in trials)
        return trials

    def _record_proposal(self, draft: Draft, number: int, index: int) -> _Candidate:
        state = draft.state
        document = None
        if state is not None:
            document = state.model_dump(mode="json", exclude={"provenance"})
        proposal = ProposalRecord(
            round=number,
            index=index,
            origin=draft.origin,
            parents=draft.parents,
            state=document,
            digest=state.digest if state else "",
            problems=tuple(str(problem)[:500] for problem in draft.problems[:8]),
            hypothesis=draft.hypothesis,
        )
        return _Candidate(self.ledger.put(proposal), state)

    def _find_references(
        self, candidates: Sequence[_Candidate], history: History
    ) -> list[_Reference]:
        """Leaders and parents of hypotheses that were not asked this round's questions.

        They are in the order of their names. The base policy is not among them, because it is
        always asked.
        """
        leaders = {trial.name for trial in (*history.leaders(), history.leader())}
        children: dict[str, list[_Candidate]] = {name: [] for name in leaders}
        for candidate in candidates:
            proposal = candidate.proposal
            if proposal.hypothesis is not None:
                for name in proposal.parents[:1]:
                    parent = history.find_measured(name)
                    if parent is not None:
                        children.setdefault(parent.name, []).append(candidate)
        references: list[_Reference] = []
        for trial in sorted(history.trials, key=lambda trial: trial.name):
            values = history.values(trial)
            if trial.name not in children or values is None:
                continue
            if not np.isfinite(values[self._block]).any():
                references.append(
                    _Reference(
                        trial.proposal,
                        trial.state,
                        is_leader=trial.name in leaders,
                        children=children[trial.name],
                    )
                )
        return references

    async def _measure_all(
        self, candidates: Sequence[_Candidate], start: int, stop: int
    ) -> None:
        """Ask all candidates questions of the round concurrently; those that fail are finished."""
        outcomes = await asyncio.gather(
            *(self._measure(candidate, start, stop) for candidate in candidates),
            return_exceptions=True,
        )
        for candidate, outcome in zip(candidates, outcomes, strict=True):
            if isinstance(outcome, EvaluationFailed):
                reason = outcome.reason
                candidate.result = self._result(candidate, "unevaluated", reason=reason)
            elif isinstance(outcome, BaseException):
                raise outcome

    def _forget_failures(self, candidates: Sequence[_Candidate]) -> None:
        """Forget candidates that could not be measured, so that their duplicates are measured."""
        failed = {
            candidate.proposal.name
            for candidate in candidates
            if candidate.result and candidate.result.status == "unevaluated"
        }
        self._name_of = {
            key: name for key, name in self._name_of.items() if name not in failed
        }

    def _finish(self, candidate: _Candidate) -> Trial:
        """The candidate as a trial; without a result yet, it was evaluated to the end."""
        result = candidate.result or self._result(candidate, "evaluated")
        if not any(candidate.answers):
            return Trial(candidate.proposal, result, candidate.state)
        answered = self._values(candidate)
        values = np.full(len(self.examples), np.nan)
        values[self._block.start : self._block.start + len(answered)] = answered
        key = f"verdict/{candidate.proposal.digest}"
        verdict = self.ledger.find(VerdictRecord, key)
        trial = Trial(candidate.proposal, result, candidate.state, values)
        if verdict is None:
            return trial
        return replace(trial, exchanges=verdict.exchanges)

    def _values(self, candidate: _Candidate) -> Floats:
        """Values of the answers minus the unpruned model's, averaged over budgets, ``(M,)``."""
        values: Floats = self._values_by_budget(candidate).mean(0)
        return values

    def _values_by_budget(self, candidate: _Candidate) -> Floats:
        """Values of the answers minus the unpruned model's at each budget, ``(B, M)``."""
        objective = self.settings.objective
        questions = self._questions
        return np.array(
            [
                self.scales.apply(
                    questions, answers.relative_to(self._full, questions, objective)
                )
                for answers in candidate.answers
            ]
        )

    def _screen(self, candidate: _Candidate) -> TrialRecord | None:
        """The result of a candidate that needs no measurement, or None."""
        proposal = candidate.proposal
        state = candidate.state
        if state is None:
            reason = proposal.problems[0] if proposal.problems else "no state"
            return self._result(candidate, "invalid", reason=reason)
        if state.digest in self._name_of:
            return self._result(candidate, "same", same_as=self._name_of[state.digest])
        if problems := self._check(state).problems:
            return self._result(candidate, "unsafe", reason=problems[0])
        # The name is stored before the measurement, because a later draft of this round may be a
        # duplicate.
        name = self._name_of.setdefault(self._fingerprint(state), proposal.name)
        self._name_of[state.digest] = name
        if name == proposal.name:
            return None
        return self._result(candidate, "same", same_as=name)

    def _check(self, state: PruningState) -> VerdictRecord:
        """Safety check at every budget of the search; its problems are recorded, not raised."""
        recorded = self.ledger.find(VerdictRecord, f"verdict/{state.digest}")
        if recorded is not None:
            return recorded
        policies: list[PruningPolicy] = []
        problems: list[str] = []
        for budget in self.settings.budgets:
            try:
                policy = materialize(state, BudgetCall.parse(budget))
            except AutopruneError as error:
                problems += map(str, error.problems or [error])
                continue
            policies.append(policy)
            for verdict in safety_check(policy).verdicts:
                if not verdict.ok:
                    problems.append(f"{verdict.name} at K = {budget}: {verdict.detail}")
        if problems:
            return self.ledger.put(
                VerdictRecord(
                    digest=state.digest, valid=False, problems=tuple(problems)
                )
            )
        first_budget = BudgetCall.parse(self.settings.budgets[0])
        record = VerdictRecord(
            digest=state.digest,
            valid=True,
            quota=policies[0].quota,
            r_min=policies[0].r_min,
            behaviour=fingerprint(policies, self.probes) if self.probes else "",
            exchanges=count_exchanges(state, first_budget, self.probes),
        )
        return self.ledger.put(record)

    def _fingerprint(self, state: PruningState) -> str:
        """Key that is equal for states with the same selections on the probes."""
        return self._check(state).behaviour or state.digest

    async def _measure(self, candidate: _Candidate, start: int, stop: int) -> None:
        """Ask a candidate the questions ``start`` to ``stop`` of the round."""
        begin = self._block.start
        jobs = (
            EvaluationJob(
                candidate.state, budget, "search", begin + start, begin + stop
            )
            for budget in self.settings.budgets
        )
        answers = await asyncio.gather(*map(self.evaluator.evaluate, jobs))
        earlier = candidate.answers or [Answers()] * len(answers)
        candidate.answers = [a + b for a, b in zip(earlier, answers, strict=True)]

    def _drop_losers(
        self, candidates: Sequence[_Candidate], race: _Race, divisor: int
    ) -> None:
        """Drop candidates that are clearly worse than the leader or tied with it, and weak ones.

        Of the candidates that are neither, one in ``divisor`` goes on, the best first.
        """
        undecided: list[tuple[_Candidate, Floats]] = []
        for candidate in _unfinished(candidates):
            values = self._values(candidate)
            gap = compare(self._questions[: len(values)], values, race.leader_values)
            reason = ""
            if gap.verdict(errors=RACING_ERRORS) == "worse":
                reason = "behind"
            elif race.resolution and gap.verdict(race.resolution) == "same":
                reason = "tied with"
            if reason:
                figures = race.describe(gap, len(values))
                reason = (
                    f"{reason} {race.leader}, the leader before the round: {figures}"
                )
                candidate.result = self._result(
                    candidate, "dropped", rival=race.leader, reason=reason
                )
            else:
                undecided.append((candidate, values))
        undecided.sort(key=lambda entry: -float(entry[1].mean()))
        best = math.ceil(len(undecided) / divisor)
        for place, (candidate, values) in enumerate(undecided[best:], best + 1):
            last, values_of_last = undecided[best - 1]
            gap = compare(self._questions[: len(values)], values, values_of_last)
            rival = last.proposal.name
            reason = (
                f"outranked, at place {place} of {len(undecided)}, by {rival} at place {best}, the "
                f"last to go on: {race.describe(gap, len(values))}"
            )
            candidate.result = self._result(
                candidate, "dropped", rival=rival, reason=reason
            )

    def _result(
        self,
        candidate: _Candidate,
        status: Status,
        *,
        same_as: str = "",
        rival: str = "",
        reason: str = "",
    ) -> TrialRecord:
        """The record of the candidate's result; scores are means over the budgets."""
        record = TrialRecord(
            round=candidate.proposal.round,
            index=candidate.proposal.index,
            status=status,
            same_as=same_as,
            rival=rival,
            reason=reason[:500],
            examples=sum(map(len, candidate.answers)),
        )
        if status == "unevaluated" or not record.examples:
            return record
        objectives = self._values_by_budget(candidate).mean(1).tolist()
        accuracies = [answers.accuracy for answers in candidate.answers]
        update = {
            "objective": rounded_mean(objectives),
            "accuracy": rounded_mean(accuracies),
        }
        return record.model_copy(update=update)


_C = TypeVar("_C", bound=_Candidate)


def _unfinished(candidates: Iterable[_C]) -> list[_C]:
    return [candidate for candidate in candidates if candidate.result is None]
