"""Safety check of a candidate, and fingerprint of its selections."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offline_search.candidates import Draft
from offline_search.components import Candidate, SelectionProgram
from offline_search.dataset import Dataset
from offline_search.evaluator import EvaluationJob, RecordedEvaluator
from offline_search.history import (
    NO_ANSWERS,
    Answers,
    History,
    Trial,
    accuracy,
    accuracy_plus,
    relative_values,
    significantly_below,
)
from offline_search.ledger import Ledger, ProposalRecord, Status, TrialRecord, VerdictRecord
from offline_search.programs import select_with_program
from offline_search.settings import Settings
from vllm_autoprune.errors import AutopruneError, EvaluationFailed, ProblemsError, SelectionError
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.ops.rowwise import gather_rows
from vllm_autoprune.statistics import Floats
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.safety import safety_check
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import VisualTokens

Probes = Sequence[VisualTokens]
"""Visual tokens of a few images, as the served model computes them."""

PROBE_IMAGES = 16
"""Images of the probe set, each with one question."""


def check_candidate(state: PruningState, settings: Settings, probes: Probes) -> VerdictRecord:
    """Verdict on a state at every budget of the search; problems are recorded, not raised."""
    problems: list[str] = []
    for budget in settings.budgets:
        try:
            policy = materialize(state, budget)
        except AutopruneError as error:
            problems += _messages(error)
            continue
        failed = [verdict for verdict in safety_check(policy).verdicts if not verdict.ok]
        problems += [f"{verdict.name} at K = {budget}: {verdict.detail}" for verdict in failed]
    if problems:
        return VerdictRecord(digest=state.digest, valid=False, problems=tuple(problems))
    policy = materialize(state, settings.source_budget)
    return VerdictRecord(
        digest=state.digest,
        valid=True,
        quota=policy.quota,
        r_min=policy.r_min,
        behaviour=selection_fingerprint(state, settings.budgets, probes),
    )


async def check_program(
    program: SelectionProgram, settings: Settings, probes: Probes
) -> VerdictRecord:
    """Verdict on a program that selects tokens: it runs on every probe, twice with equal results.

    Its fingerprint is that of a state that keeps the same tokens and merges none.
    """
    digest = hashlib.sha256()
    try:
        for budget in settings.budgets:
            for tokens in probes:
                first, second = [
                    await select_with_program(program, tokens, settings.base_policy, budget)
                    for _ in range(2)
                ]
                if not torch.equal(first, second):
                    raise SelectionError("select returns other indices when it is run again")
                _update_fingerprint(digest, first, gather_rows(tokens.features, first))
    except SelectionError as error:
        return VerdictRecord(digest=program.digest, valid=False, problems=(str(error)[:300],))
    behaviour = digest.hexdigest() if probes else ""
    return VerdictRecord(digest=program.digest, valid=True, behaviour=behaviour)


@torch.no_grad()
def selection_fingerprint(state: PruningState, budgets: Sequence[int], probes: Probes) -> str:
    """SHA-256 of the token rows selected for every probe; empty without probes.

    Includes features as well as indices, because two states may keep the same tokens and merge the
    discarded ones differently.
    """
    if not probes:
        return ""
    digest = hashlib.sha256()
    for budget in budgets:
        policy = materialize(state, budget)
        for tokens in probes:
            refined = refine(policy.at(tokens.count, tokens.grid.tiles), tokens)
            _update_fingerprint(digest, refined.indices, refined.features)
    return digest.hexdigest()


def _update_fingerprint(digest: hashlib._Hash, indices: Tensor, features: Tensor) -> None:
    digest.update(indices.contiguous().numpy().tobytes())
    digest.update(features.float().contiguous().numpy().tobytes())


def _messages(error: AutopruneError) -> list[str]:
    if isinstance(error, ProblemsError):
        return [str(problem) for problem in error.problems]
    return [str(error)]


def probes_from_checkpoint(
    checkpoint: Path, text_tower: Path | None, dataset: Dataset
) -> Sequence[VisualTokens]:
    """Probes from a local checkpoint: the first search images, each with its first question.

    Raises :class:`ConfigError` or :class:`UnsupportedModelError`.
    """
    # Imported here, because it loads transformers.
    from PIL import Image

    from vllm_autoprune.checkpoint import open_vision

    vision = open_vision(checkpoint, text_tower)
    by_image = {example.image: example for example in reversed(dataset.examples("search"))}
    probes = []
    for example in islice(reversed(by_image.values()), PROBE_IMAGES):
        with Image.open(dataset.folder / example.image) as image:
            probes.append(vision.encode(image, example.question))
    return probes


RACING_SHARES = (0.125, 0.5, 1.0)
"""Shares of the search split after which a race drops candidates."""

RACING_KEEPS = (3, 2)
"""Of so many candidates of a round, one goes on after each share but the last: of 15, 5, then 3.

Those that are clearly worse than the best so far are dropped before."""


@dataclass
class ScoreAccumulator:
    """Answers of one state so far, by budget, and the scores computed from them."""

    settings: Settings
    full: Answers
    examples: Sequence[Example]
    answers: dict[int, Answers] = field(default_factory=dict)

    def add(self, budget: int, answers: Answers) -> None:
        """Append answers to the examples that follow those already answered."""
        self.answers[budget] = self.answers.get(budget, NO_ANSWERS) + answers

    def values(self, budget: int) -> Floats:
        """Value of each answered example, relative to the unpruned model, at one budget."""
        return relative_values(self.settings, self.examples, self.answers[budget], self.full)

    def combined(self) -> Floats:
        """Value of each answered example, mean over the budgets."""
        mean: Floats = np.mean([self.values(k) for k in self.settings.budgets], axis=0)
        return mean

    def objective(self) -> float:
        """Mean objective over the budgets."""
        each = [float(self.values(budget).mean()) for budget in self.settings.budgets]
        return round(sum(each) / len(each), 6)

    def answer_count(self) -> int:
        """Number of answers, over all budgets."""
        return sum(map(len, self.answers.values()))


@dataclass
class _Candidate:
    """A candidate during its round; it is finished once it has a result."""

    draft: Draft
    proposal: ProposalRecord
    scores: ScoreAccumulator
    result: TrialRecord | None = None


class RoundEvaluator:
    """Turns the drafts of a round into trials, and records every step in the ledger."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        evaluator: RecordedEvaluator,
        examples: Sequence[Example],
        probes: Probes,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._evaluator = evaluator
        self._examples = examples
        self._probes = probes
        self._full = NO_ANSWERS
        self._known: dict[str, str] = {}
        """Digest or selection fingerprint -> name of the candidate that was measured for it."""

    async def evaluate_baselines(self, base: PruningState) -> History:
        """Measure the unpruned model and the base policy; gives the initial history."""
        count = len(self._examples)
        self._full = await self._evaluator.evaluate(EvaluationJob(None, 0, "search", 0, count))
        scores = self._new_scores()
        await self._measure_candidate(base, scores, 0, count)
        verdict = await self._check(base)
        self._known |= {base.digest: "base", verdict.behaviour or base.digest: "base"}
        proposal = ProposalRecord(round=0, index=0, origin="base policy", digest=base.digest)
        result = self._trial_record(proposal, "evaluated", scores)
        settings = self._settings
        names_bases = bool(settings.proposer and settings.bases)
        return History(result, scores.combined(), examples=self._examples, names_bases=names_bases)

    async def evaluate_round(
        self, drafts: Sequence[Draft], number: int, history: History, early_stopping: bool
    ) -> list[Trial]:
        """The trials of one round in the order of its drafts; states are measured concurrently."""
        proposals = [
            self._ledger.put(_proposal_record(draft, number, index))
            for index, draft in enumerate(drafts)
        ]
        candidates = [
            _Candidate(draft, proposal, self._new_scores())
            for draft, proposal in zip(drafts, proposals, strict=True)
        ]
        for candidate in candidates:
            candidate.result = await self._screen(candidate)
        await self._measure_all(candidates, history, early_stopping)
        return [self._finish(candidate) for candidate in candidates]

    def _new_scores(self) -> ScoreAccumulator:
        return ScoreAccumulator(self._settings, self._full, self._examples)

    async def _screen(self, candidate: _Candidate) -> TrialRecord | None:
        """The result of a candidate that needs no measurement, or None."""
        proposal, proposed = candidate.proposal, candidate.draft.candidate
        if proposed is None:
            reason = proposal.problems[0] if proposal.problems else "no state"
            return self._trial_record(proposal, "invalid", reason=reason)
        if proposed.digest in self._known:
            return self._trial_record(proposal, "same", same_as=self._known[proposed.digest])
        verdict = await self._check(proposed)
        if not verdict.valid:
            return self._trial_record(proposal, "unsafe", reason=verdict.problems[0])
        duplicate = verdict.behaviour and self._known.get(verdict.behaviour)
        if duplicate:
            self._known[proposed.digest] = duplicate
            return self._trial_record(proposal, "same", same_as=duplicate)
        # Remembered before it is measured, because a later draft of this round may be a duplicate.
        self._known |= {
            proposed.digest: proposal.name,
            verdict.behaviour or proposed.digest: proposal.name,
        }
        return None

    async def _measure_all(
        self, candidates: Sequence[_Candidate], history: History, early_stopping: bool
    ) -> None:
        """Measure all unfinished candidates on the search split, in steps with early stopping."""
        start = 0
        for step, share in enumerate(RACING_SHARES if early_stopping else (1.0,)):
            stop = max(1, round(share * len(self._examples)))
            await self._measure_step(list(_unfinished(candidates)), start, stop)
            if stop < len(self._examples):
                self._drop_losers(_unfinished(candidates), history.best_values(), stop)
                self._keep_best(list(_unfinished(candidates)), RACING_KEEPS[step], stop)
            start = stop

    async def _measure_step(self, candidates: Sequence[_Candidate], start: int, stop: int) -> None:
        """Measure examples ``start`` to ``stop``; candidates that fail get their result."""
        jobs = [
            self._measure_candidate(proposed, candidate.scores, start, stop)
            for candidate in candidates
            if (proposed := candidate.draft.candidate) is not None
        ]
        outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        for candidate, outcome in zip(candidates, outcomes, strict=True):
            if isinstance(outcome, EvaluationFailed):
                self._forget(candidate.proposal.name)
                candidate.result = self._trial_record(
                    candidate.proposal, "unevaluated", candidate.scores, reason=str(outcome)
                )
            elif isinstance(outcome, BaseException):
                raise outcome

    async def _measure_candidate(
        self, candidate: Candidate, scores: ScoreAccumulator, start: int, stop: int
    ) -> None:
        budgets = self._settings.budgets
        jobs = [EvaluationJob(candidate, budget, "search", start, stop) for budget in budgets]
        answers = await asyncio.gather(*(self._evaluator.evaluate(job) for job in jobs))
        for budget, each in zip(budgets, answers, strict=True):
            scores.add(budget, each)

    def _drop_losers(self, candidates: Iterator[_Candidate], reference: Floats, stop: int) -> None:
        for candidate in candidates:
            if significantly_below(self._examples, candidate.scores.combined(), reference):
                reason = f"behind after {stop} of {len(self._examples)} examples"
                candidate.result = self._trial_record(
                    candidate.proposal, "dropped", candidate.scores, reason=reason
                )

    def _keep_best(self, candidates: Sequence[_Candidate], divisor: int, stop: int) -> None:
        """Drop all but the best of a round by the examples so far, one in ``divisor``."""
        ranked = sorted(
            candidates, key=lambda candidate: -float(candidate.scores.combined().mean())
        )
        for candidate in ranked[-(-len(ranked) // divisor) :]:
            reason = f"not among the best after {stop} of {len(self._examples)} examples"
            candidate.result = self._trial_record(
                candidate.proposal, "dropped", candidate.scores, reason=reason
            )

    def _finish(self, candidate: _Candidate) -> Trial:
        scores = candidate.scores
        result = candidate.result or self._trial_record(candidate.proposal, "evaluated", scores)
        result = self._ledger.put(result)
        values = scores.combined() if scores.answer_count() else None
        draft = candidate.draft
        return Trial(candidate.proposal, result, draft.state, values, draft.selection)

    def _forget(self, name: str) -> None:
        """Forget a candidate whose evaluation failed, so that later duplicates are evaluated."""
        self._known = {key: known for key, known in self._known.items() if known != name}

    async def _check(self, candidate: Candidate) -> VerdictRecord:
        known = self._ledger.find(VerdictRecord, f"verdict/{candidate.digest}")
        if known is not None:
            return known
        if isinstance(candidate, SelectionProgram):
            verdict = await check_program(candidate, self._settings, self._probes)
        else:
            verdict = check_candidate(candidate, self._settings, self._probes)
        return self._ledger.put(verdict)

    def _trial_record(
        self,
        proposal: ProposalRecord,
        status: Status,
        scores: ScoreAccumulator | None = None,
        *,
        same_as: str = "",
        reason: str = "",
    ) -> TrialRecord:
        figures: dict[str, Any] = {}
        if scores is not None and scores.answers and status != "unevaluated":
            figures = self._summary_scores(scores)
        return TrialRecord(
            round=proposal.round,
            index=proposal.index,
            status=status,
            same_as=same_as,
            reason=reason[:500],
            examples=0 if scores is None else scores.answer_count(),
            **figures,
        )

    def _summary_scores(self, scores: ScoreAccumulator) -> dict[str, Any]:
        answers = [scores.answers[budget] for budget in self._settings.budgets]
        return {
            "objective": scores.objective(),
            "accuracy": _mean([accuracy(each) for each in answers]),
            "accuracy_plus": _mean([accuracy_plus(self._examples, each) for each in answers]),
        }


def _unfinished(candidates: Sequence[_Candidate]) -> Iterator[_Candidate]:
    return (candidate for candidate in candidates if candidate.result is None)


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 6)


def _proposal_record(draft: Draft, number: int, index: int) -> ProposalRecord:
    state, candidate = draft.state, draft.candidate
    return ProposalRecord(
        round=number,
        index=index,
        origin=draft.origin,
        parents=draft.parents,
        state=None if state is None else state.model_dump(mode="json", exclude={"provenance"}),
        digest="" if candidate is None else candidate.digest,
        problems=tuple(str(problem)[:500] for problem in draft.problems[:8]),
        program=draft.program,
        hypothesis=draft.hypothesis,
    )
