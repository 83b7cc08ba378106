"""Evaluation of one round of candidates: safety check, duplicate detection, early stopping."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from offline_search.candidates import Draft
from offline_search.dataset import Dataset, cut_blocks
from offline_search.evaluator import EvaluationJob, RecordedEvaluator
from offline_search.history import Answers, History, Trial, compare
from offline_search.ledger import (
    Ledger,
    ProposalRecord,
    Status,
    TrialRecord,
    VerdictRecord,
)
from offline_search.settings import Settings
from vllm_autoprune.errors import AutopruneError, EvaluationFailed
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.statistics import Floats
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.safety import safety_check
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import VisualTokens

_PROBE_IMAGES = 16
"""Images of the probe set, each with one question."""


def probes_from_checkpoint(
    checkpoint: Path, text_tower: Path | None, dataset: Dataset
) -> Sequence[VisualTokens]:
    """Probes from a local checkpoint: the first search images, each with its first question.

    Raises :class:`ConfigError` or :class:`UnsupportedModelError`.
    """
    # Imported here, because it loads transformers.
    from vllm_autoprune.checkpoint import LlavaVision

    vision = LlavaVision(checkpoint, text_tower)
    by_image = {
        example.image: example for example in reversed(dataset.splits["search"])
    }
    probes = []
    for example in islice(reversed(by_image.values()), _PROBE_IMAGES):
        probes.append(
            vision.encode(dataset.images[example.image].image(), example.question)
        )
    return probes


_RACING_SHARES = (0.125, 0.5, 1.0)
"""Shares of a round's questions after which a race drops candidates."""

_RACING_KEEPS = (3, 2)
"""Of so many candidates of a round, one goes on after each share but the last: of 15, 5, then 3.

Those that are clearly worse than the best so far are dropped before."""


_RACING_ERRORS = 3.0
"""Standard errors by which a candidate is clearly worse: a race tests each several times."""


@dataclass
class _Candidate:
    """A candidate during a round, with its answers by budget; finished once it has a result."""

    proposal: ProposalRecord
    state: PruningState | None
    answers: list[Answers]
    result: TrialRecord | None = None


@dataclass
class RoundEvaluator:
    """Turns the drafts of a round into trials, and records every step in the ledger."""

    settings: Settings
    ledger: Ledger
    evaluator: RecordedEvaluator
    examples: Sequence[Example]
    probes: Sequence[VisualTokens]
    """Visual tokens of a few images, as the served model computes them."""
    _full: Answers = field(default_factory=Answers)
    """Of the unpruned model to the questions of the round."""
    _known: dict[str, str] = field(default_factory=dict)
    """Digest or selection fingerprint -> name of the candidate that was measured for it."""
    _block: slice = field(default_factory=lambda: slice(0))
    """The questions of the round among ``examples``."""

    def __post_init__(self) -> None:
        images = [example.image for example in self.examples]
        self.blocks = cut_blocks(images, self.settings.block)

    @property
    def _asked(self) -> Sequence[Example]:
        """The questions of the round."""
        return self.examples[self._block]

    async def evaluate_baselines(self, base: PruningState) -> History:
        """Measure the unpruned model and the base policy; gives the initial history."""
        proposal = ProposalRecord(
            round=0, index=0, origin="base policy", digest=base.digest
        )
        candidate = await self._open_block(1, _Candidate(proposal, base, []))
        self._known |= dict.fromkeys((base.digest, self._fingerprint(base)), "base")
        names_bases = bool(self.settings.proposer and self.settings.bases)
        return History(self._finish(candidate), [], self.examples, names_bases)

    async def _open_block(self, number: int, base: _Candidate) -> _Candidate:
        """Ask the unpruned model and the base policy the questions of a round."""
        self._block = self.blocks[(number - 1) % len(self.blocks)]
        job = EvaluationJob(None, 0, "search", self._block.start, self._block.stop)
        self._full = await self.evaluator.evaluate(job)
        base.answers = [Answers()] * len(self.settings.budgets)
        await self._measure(base, 0, len(self._asked))
        return base

    async def evaluate_round(  # noqa: C901
        self,
        drafts: Sequence[Draft],
        number: int,
        history: History,
        early_stopping: bool,
    ) -> list[Trial]:
        """The trials of one round in the order of its drafts; states are measured concurrently.

        Leaders, and parents whose children a hypothesis is about, are asked fresh questions too.
        """
        base = history.base
        opened = await self._open_block(
            number, _Candidate(base.proposal, base.state, [])
        )
        history.add_values(base.name, self._block, self._values(opened).mean(0))
        candidates: list[_Candidate] = []
        for index, draft in enumerate(drafts):
            state = draft.state
            proposal = ProposalRecord(
                round=number,
                index=index,
                origin=draft.origin,
                parents=draft.parents,
                state=state.model_dump(mode="json", exclude={"provenance"})
                if state
                else None,
                digest=state.digest if state else "",
                problems=tuple(str(problem)[:500] for problem in draft.problems[:8]),
                hypothesis=draft.hypothesis,
            )
            answers = [Answers()] * len(self.settings.budgets)
            candidates.append(_Candidate(self.ledger.put(proposal), state, answers))
        for candidate in candidates:
            candidate.result = self._screen(candidate)
        leader = history.leader().name
        leaders = {trial.name for trial in history.leaders()} | {leader}
        # Names of whom the round's candidates are compared with, with the candidates.
        children: dict[str, list[_Candidate]] = {name: [] for name in leaders}
        for candidate in candidates:
            for name in (
                candidate.proposal.parents[:1] if candidate.proposal.hypothesis else ()
            ):
                if (parent := history.find_measured(name)) is not None:
                    children.setdefault(parent.name, []).append(candidate)
        again: list[_Candidate] = []
        for name in sorted(children):
            trial = history.find(name)
            known = history.values_of(name)
            if trial is None or trial is history.base or known is None:
                continue
            if not np.isfinite(known[self._block]).any():
                answers = [Answers()] * len(self.settings.budgets)
                again.append(_Candidate(trial.proposal, trial.state, answers))
        start = 0
        for step, share in enumerate(_RACING_SHARES if early_stopping else (1.0,)):
            stop = max(1, round(share * len(self._asked)))
            again = [
                each
                for each in again
                if each.proposal.name in leaders
                or _unfinished(children[each.proposal.name])
            ]
            measured = _unfinished(candidates) + again
            outcomes = await asyncio.gather(
                *(self._measure(candidate, start, stop) for candidate in measured),
                return_exceptions=True,
            )
            for candidate, outcome in zip(measured, outcomes, strict=True):
                if isinstance(outcome, EvaluationFailed) and candidate in again:
                    again.remove(candidate)
                elif isinstance(outcome, EvaluationFailed):
                    # Forgotten, so that later duplicates are evaluated.
                    name = candidate.proposal.name
                    known_names = self._known.items()
                    self._known = {
                        key: value for key, value in known_names if value != name
                    }
                    candidate.result = self._result(
                        candidate, "unevaluated", reason=str(outcome)
                    )
                elif isinstance(outcome, BaseException):
                    raise outcome
            for each in again:
                history.add_values(
                    each.proposal.name, self._block, self._values(each).mean(0)
                )
                history.answers += (stop - start) * len(self.settings.budgets)
            if stop < len(self._asked):
                reference = history.values_of(leader)
                assert reference is not None, "a leader was measured"
                part = reference[self._block][:stop]
                self._drop_losers(
                    candidates, part, history.resolution, _RACING_KEEPS[step]
                )
            start = stop
        trials = list(map(self._finish, candidates))
        for trial in trials:
            self.ledger.put(trial.result)
        history.trials += trials
        history.answers += sum(trial.result.examples for trial in trials)
        return trials

    def _finish(self, candidate: _Candidate) -> Trial:
        """The candidate as a trial; one that has no result yet was evaluated to the end."""
        result = candidate.result or self._result(candidate, "evaluated")
        if not any(candidate.answers):
            return Trial(candidate.proposal, result, candidate.state)
        values = np.full(len(self.examples), np.nan)
        answered = self._values(candidate).mean(0)
        values[self._block.start : self._block.start + len(answered)] = answered
        verdict = self.ledger.find(
            VerdictRecord, f"verdict/{candidate.proposal.digest}"
        )
        exchanges = None if verdict is None else verdict.exchanges
        return Trial(candidate.proposal, result, candidate.state, values, exchanges)

    def _values(self, candidate: _Candidate) -> Floats:
        """Values of the answered examples at each budget, less the unpruned model's, ``(B, M)``."""
        objective = self.settings.objective
        return np.array(
            [
                answers.relative_to(self._full, self._asked, objective)
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
        if state.digest in self._known:
            return self._result(candidate, "same", same_as=self._known[state.digest])
        if problems := self._check(state).problems:
            return self._result(candidate, "unsafe", reason=problems[0])
        # Remembered before it is measured, because a later draft of this round may be a duplicate.
        name = self._known.setdefault(self._fingerprint(state), proposal.name)
        self._known[state.digest] = name
        return (
            None
            if name == proposal.name
            else self._result(candidate, "same", same_as=name)
        )

    @torch.no_grad()
    def _check(self, state: PruningState) -> VerdictRecord:
        """Verdict on a state at every budget of the search; problems are recorded, not raised.

        Its behaviour is the SHA-256 of the token rows selected for every probe: features as well as
        indices, because two states may keep the same tokens and merge the discarded ones
        differently.
        """
        if known := self.ledger.find(VerdictRecord, f"verdict/{state.digest}"):
            return known
        problems = list[str]()
        behaviour = hashlib.sha256()
        exchanges = list[float]()
        for budget in self.settings.budgets:
            try:
                policy = materialize(state, BudgetCall.parse(budget))
                failed = [each for each in safety_check(policy).verdicts if not each.ok]
                problems += [
                    f"{each.name} at K = {budget}: {each.detail}" for each in failed
                ]
            except AutopruneError as error:
                problems += map(str, error.problems or [error])
            for tokens in () if problems else self.probes:
                refined = refine(policy.at(tokens.count, tokens.grid.tiles), tokens)
                behaviour.update(refined.indices.contiguous().numpy().tobytes())
                if budget == self.settings.budgets[0]:
                    base = materialize(
                        state.without_exchange(), BudgetCall.parse(budget)
                    )
                    kept = refine(
                        base.at(tokens.count, tokens.grid.tiles), tokens
                    ).indices
                    pairs = zip(refined.indices.tolist(), kept.tolist(), strict=True)
                    exchanges += [len({*ours} - {*theirs}) for ours, theirs in pairs]
                behaviour.update(
                    refined.features.float().contiguous().numpy().tobytes()
                )
        if problems:
            verdict = VerdictRecord(
                digest=state.digest, valid=False, problems=tuple(problems)
            )
        else:
            policy = materialize(state, BudgetCall.parse(self.settings.budgets[0]))
            verdict = VerdictRecord(
                digest=state.digest,
                valid=True,
                quota=policy.quota,
                r_min=policy.r_min,
                behaviour=behaviour.hexdigest() if self.probes else "",
                exchanges=round(float(np.mean(exchanges)), 2) if exchanges else None,
            )
        return self.ledger.put(verdict)

    def _fingerprint(self, state: PruningState) -> str:
        """What is equal for states that keep the same tokens of the probes."""
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
        candidate.answers = [
            a + b for a, b in zip(candidate.answers, answers, strict=True)
        ]

    def _drop_losers(
        self,
        candidates: Sequence[_Candidate],
        reference: Floats,
        resolution: float,
        divisor: int,
    ) -> None:
        """Drop who is clearly worse than the leader or tied with it, then all but a part.

        Of the others one in ``divisor`` goes on.
        """
        asked = self._asked[: len(reference)]
        after = f"after {len(asked)} of {len(self._asked)} examples"
        means = []
        for candidate in _unfinished(candidates):
            values = self._values(candidate).mean(0)
            gap = compare(asked, values, reference)
            if gap.verdict(errors=_RACING_ERRORS) == "worse":
                candidate.result = self._result(
                    candidate, "dropped", reason=f"behind {after}"
                )
            elif resolution and gap.is_tie(resolution):
                reason = f"tied with the best within {resolution:g} {after}"
                candidate.result = self._result(candidate, "dropped", reason=reason)
            else:
                means.append((-float(values.mean()), candidate))
        means.sort(key=lambda entry: entry[0])
        for _, candidate in means[-(-len(means) // divisor) :]:
            reason = f"not among the best {after}"
            candidate.result = self._result(candidate, "dropped", reason=reason)

    def _result(
        self,
        candidate: _Candidate,
        status: Status,
        *,
        same_as: str = "",
        reason: str = "",
    ) -> TrialRecord:
        """The candidate's record; scores are means over the budgets."""
        record = TrialRecord(
            round=candidate.proposal.round,
            index=candidate.proposal.index,
            status=status,
            same_as=same_as,
            reason=reason[:500],
            examples=sum(map(len, candidate.answers)),
        )
        if status == "unevaluated" or not any(candidate.answers):
            return record
        columns = {
            "objective": self._values(candidate).mean(1).tolist(),
            "accuracy": [each.accuracy for each in candidate.answers],
        }
        figures = {name: round(sum(c) / len(c), 6) for name, c in columns.items()}
        return record.model_copy(update=figures)


def _unfinished(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    return [candidate for candidate in candidates if candidate.result is None]
