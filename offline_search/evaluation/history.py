"""History of a search: all trials so far, and the statistics that strategies and prompts use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from offline_search.candidates.hypothesis import BASE_PARENT
from offline_search.candidates.selection_program import Candidate, SelectionProgram
from offline_search.ledger.records import ProposalRecord, TrialRecord
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.statistics import Floats
from vllm_autoprune.tpdsl.states.state import PruningState

FAILURES_TO_GIVE_UP = 25
"""Invalid or unsafe candidates in a row after which a search ends: more would only cost."""


def gave_up(results: Sequence[TrialRecord]) -> bool:
    """Whether the last of a search's trials were invalid or unsafe, as many as end it."""
    last = results[-FAILURES_TO_GIVE_UP:]
    failed = all(result.status in ("invalid", "unsafe") for result in last)
    return failed and len(last) == FAILURES_TO_GIVE_UP


@dataclass(frozen=True)
class Trial:
    """A candidate with its result; ``values`` ``(M,)`` are those of the answered examples.

    A candidate in free code has ``selection`` in place of a state.
    """

    proposal: ProposalRecord
    result: TrialRecord
    state: PruningState | None = None
    values: Floats | None = None
    selection: SelectionProgram | None = None

    @property
    def name(self) -> str:
        """``round.index``."""
        return self.proposal.name

    @property
    def objective(self) -> float | None:
        """The objective, if the whole search split was evaluated."""
        return self.result.objective if self.result.status == "evaluated" else None

    @property
    def candidate(self) -> Candidate | None:
        """What was evaluated: a state, or a program that selects tokens."""
        return self.selection if self.state is None else self.state

    @property
    def score(self) -> float:
        """The objective of a fully evaluated trial; raises :class:`ValueError` for others."""
        if self.objective is None:
            raise ValueError(f"candidate {self.name} was not evaluated to the end")
        return self.objective

    def require_state(self) -> PruningState:
        """The state; every trial that was measured has one."""
        if self.state is None:
            raise ValueError(f"candidate {self.name} has no state")
        return self.state

    def require_candidate(self) -> Candidate:
        """The state or the program; every trial that was measured has one."""
        if self.candidate is None:
            raise ValueError(f"candidate {self.name} is invalid")
        return self.candidate


@dataclass
class History:
    """Trials in order of proposal, with the result of the base policy alone."""

    base: TrialRecord
    base_values: Floats
    trials: list[Trial] = field(default_factory=list)
    examples: Sequence[Example] = ()
    names_bases: bool = False
    """Whether a language model chooses among base policies, which prompts then name."""

    def evaluated(self) -> list[Trial]:
        """Trials that were evaluated on the whole search split, in order of proposal."""
        return [trial for trial in self.trials if trial.objective is not None]

    def ranked(self) -> list[Trial]:
        """Evaluated trials, best objective first; earlier trials first among equals."""
        return sorted(self.evaluated(), key=lambda trial: -trial.score)

    def best(self) -> Trial | None:
        """The trial with the highest objective so far."""
        return max(self.evaluated(), key=lambda trial: trial.score, default=None)

    def objective_of(self, name: str) -> float | None:
        """The objective of a trial, or of the trial that it duplicates."""
        if name == BASE_PARENT:
            return self.base.objective
        trial = self.find(name)
        if trial is None:
            return None
        if trial.result.status == "same":
            return self.objective_of(trial.result.same_as)
        return self.estimate(trial)

    def values_of(self, name: str) -> Floats | None:
        """The values of a trial, or of the trial that it duplicates."""
        if name == BASE_PARENT:
            return self.base_values
        trial = self.find(name)
        if trial is None:
            return None
        same = trial.result.status == "same"
        return self.values_of(trial.result.same_as) if same else trial.values

    def estimate(self, trial: Trial) -> float | None:
        """The objective of a trial, estimated where the race ended before its last example.

        The examples that a dropped trial was measured on are corrected for their difficulty: the
        difference between all examples and these, averaged over all fully evaluated trials.
        """
        if trial.objective is not None or trial.values is None or not len(trial.values):
            return trial.objective
        known = [one.values for one in self.evaluated() if one.values is not None]
        mean = np.mean([self.base_values, *known], axis=0)
        count = len(trial.values)
        return float(trial.values.mean() + mean.mean() - mean[:count].mean())

    def best_values(self) -> Floats:
        """Values of the best trial, or of the base policy if that is at least as good."""
        best, base = self.best(), self.base.objective
        if best is None or best.values is None or (base is not None and best.score <= base):
            return self.base_values
        return best.values

    def count_failures(self) -> Counter[str]:
        """Number of candidates per reason for which they were not evaluated."""
        reasons: Counter[str] = Counter()
        for trial in self.trials:
            if trial.result.status in ("invalid", "unsafe", "unevaluated"):
                reasons.update(trial.proposal.problems or (trial.result.reason,))
        return reasons

    def find(self, name: str) -> Trial | None:
        """The trial of a name."""
        return next((trial for trial in self.trials if trial.name == name), None)
