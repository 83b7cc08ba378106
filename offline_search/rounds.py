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
from offline_search.dataset import Dataset
from offline_search.evaluator import EvaluationJob, RecordedEvaluator
from offline_search.history import Answers, History, Trial, paired_error
from offline_search.ledger import Ledger, ProposalRecord, Status, TrialRecord, VerdictRecord
from offline_search.settings import Settings
from vllm_autoprune.errors import AutopruneError, EvaluationFailed, ProblemsError
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
    by_image = {example.image: example for example in reversed(dataset.splits["search"])}
    probes = []
    for example in islice(reversed(by_image.values()), _PROBE_IMAGES):
        probes.append(vision.encode(dataset.images[example.image].image(), example.question))
    return probes


_RACING_SHARES = (0.125, 0.5, 1.0)
"""Shares of the search split after which a race drops candidates."""

_RACING_KEEPS = (3, 2)
"""Of so many candidates of a round, one goes on after each share but the last: of 15, 5, then 3.

Those that are clearly worse than the best so far are dropped before."""


@dataclass
class _Candidate:
    """A candidate during its round, with its answers by budget; finished once it has a result."""

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
    _known: dict[str, str] = field(default_factory=dict)
    """Digest or selection fingerprint -> name of the candidate that was measured for it."""

    async def evaluate_baselines(self, base: PruningState) -> History:
        """Measure the unpruned model and the base policy; gives the initial history."""
        count, settings = len(self.examples), self.settings
        self._full = await self.evaluator.evaluate(EvaluationJob(None, 0, "search", 0, count))
        proposal = ProposalRecord(round=0, index=0, origin="base policy", digest=base.digest)
        candidate = _Candidate(proposal, base, [Answers()] * len(settings.budgets))
        await self._measure(candidate, 0, count)
        self._known |= dict.fromkeys((base.digest, self._fingerprint(base)), "base")
        names_bases = bool(settings.proposer and settings.bases)
        return History(self._finish(candidate), [], self.examples, names_bases)

    async def evaluate_round(
        self, drafts: Sequence[Draft], number: int, history: History, early_stopping: bool
    ) -> list[Trial]:
        """The trials of one round in the order of its drafts; states are measured concurrently."""
        candidates: list[_Candidate] = []
        for index, draft in enumerate(drafts):
            state = draft.state
            proposal = ProposalRecord(
                round=number,
                index=index,
                origin=draft.origin,
                parents=draft.parents,
                state=state.model_dump(mode="json", exclude={"provenance"}) if state else None,
                digest=state.digest if state else "",
                problems=tuple(str(problem)[:500] for problem in draft.problems[:8]),
                hypothesis=draft.hypothesis,
            )
            answers = [Answers()] * len(self.settings.budgets)
            candidates.append(_Candidate(self.ledger.put(proposal), state, answers))
        for candidate in candidates:
            candidate.result = self._screen(candidate)
        start = 0
        for step, share in enumerate(_RACING_SHARES if early_stopping else (1.0,)):
            stop = max(1, round(share * len(self.examples)))
            measured = _unfinished(candidates)
            outcomes = await asyncio.gather(
                *(self._measure(candidate, start, stop) for candidate in measured),
                return_exceptions=True,
            )
            for candidate, outcome in zip(measured, outcomes, strict=True):
                if isinstance(outcome, EvaluationFailed):
                    # Forgotten, so that later duplicates are evaluated.
                    name = candidate.proposal.name
                    known = self._known.items()
                    self._known = {key: value for key, value in known if value != name}
                    candidate.result = self._result(candidate, "unevaluated", reason=str(outcome))
                elif isinstance(outcome, BaseException):
                    raise outcome
            if stop < len(self.examples):
                self._drop_losers(candidates, history.best_values(), stop, _RACING_KEEPS[step])
            start = stop
        trials = list(map(self._finish, candidates))
        for trial in trials:
            self.ledger.put(trial.result)
        return trials

    def _finish(self, candidate: _Candidate) -> Trial:
        """The candidate as a trial; one that has no result yet was evaluated to the end."""
        result = candidate.result or self._result(candidate, "evaluated")
        values = self._values(candidate).mean(0) if any(candidate.answers) else None
        return Trial(candidate.proposal, result, candidate.state, values)

    def _values(self, candidate: _Candidate) -> Floats:
        """Values of the answered examples at each budget, less the unpruned model's, ``(B, M)``."""
        objective = self.settings.objective
        return np.array([
            answers.relative_to(self._full, self.examples, objective)
            for answers in candidate.answers
        ])  # fmt: skip

    def _screen(self, candidate: _Candidate) -> TrialRecord | None:
        """The result of a candidate that needs no measurement, or None."""
        proposal, state = candidate.proposal, candidate.state
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
        return None if name == proposal.name else self._result(candidate, "same", same_as=name)

    @torch.no_grad()
    def _check(self, state: PruningState) -> VerdictRecord:
        """Verdict on a state at every budget of the search; problems are recorded, not raised.

        Its behaviour is the SHA-256 of the token rows selected for every probe: features as well as
        indices, because two states may keep the same tokens and merge the discarded ones
        differently.
        """
        if known := self.ledger.find(VerdictRecord, f"verdict/{state.digest}"):
            return known
        problems, behaviour = list[str](), hashlib.sha256()
        for budget in self.settings.budgets:
            try:
                policy = materialize(state, BudgetCall.parse(budget))
                failed = [each for each in safety_check(policy).verdicts if not each.ok]
                problems += [f"{each.name} at K = {budget}: {each.detail}" for each in failed]
            except ProblemsError as error:
                problems += map(str, error.problems)
            except AutopruneError as error:
                problems.append(str(error))
            for tokens in () if problems else self.probes:
                refined = refine(policy.at(tokens.count, tokens.grid.tiles), tokens)
                behaviour.update(refined.indices.contiguous().numpy().tobytes())
                behaviour.update(refined.features.float().contiguous().numpy().tobytes())
        if problems:
            verdict = VerdictRecord(digest=state.digest, valid=False, problems=tuple(problems))
        else:
            policy = materialize(state, BudgetCall.parse(self.settings.budgets[0]))
            verdict = VerdictRecord(
                digest=state.digest,
                valid=True,
                quota=policy.quota,
                r_min=policy.r_min,
                behaviour=behaviour.hexdigest() if self.probes else "",
            )
        return self.ledger.put(verdict)

    def _fingerprint(self, state: PruningState) -> str:
        """What is equal for states that keep the same tokens of the probes."""
        return self._check(state).behaviour or state.digest

    async def _measure(self, candidate: _Candidate, start: int, stop: int) -> None:
        jobs = (
            EvaluationJob(candidate.state, budget, "search", start, stop)
            for budget in self.settings.budgets
        )
        answers = await asyncio.gather(*map(self.evaluator.evaluate, jobs))
        candidate.answers = [a + b for a, b in zip(candidate.answers, answers, strict=True)]

    def _drop_losers(
        self, candidates: Sequence[_Candidate], reference: Floats, stop: int, divisor: int
    ) -> None:
        """Drop those clearly worse than the best so far, then all but one in ``divisor``."""
        after = f"after {stop} of {len(self.examples)} examples"
        means = []
        for candidate in _unfinished(candidates):
            values = self._values(candidate).mean(0)
            if _is_clearly_below(self.examples, values, reference):
                candidate.result = self._result(candidate, "dropped", reason=f"behind {after}")
            else:
                means.append((-float(values.mean()), candidate))
        means.sort(key=lambda entry: entry[0])
        for _, candidate in means[-(-len(means) // divisor) :]:
            reason = f"not among the best {after}"
            candidate.result = self._result(candidate, "dropped", reason=reason)

    def _result(
        self, candidate: _Candidate, status: Status, *, same_as: str = "", reason: str = ""
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


def _is_clearly_below(examples: Sequence[Example], values: Floats, reference: Floats) -> bool:
    """Whether the paired mean difference to a reference is more than three standard errors below 0.

    Three instead of two, because a race tests every candidate several times. Never with fewer than
    four images.
    """
    gaps = values - reference[: len(values)]
    if len({example.image for example in examples[: len(gaps)]}) < 4:
        return False
    return bool(gaps.mean() + 3 * paired_error(examples, gaps) < 0)
