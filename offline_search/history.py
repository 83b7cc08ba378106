"""Answers of one policy to a sequence of examples, and the scores computed from them.

The objective is the mean log-probability of the reference answer minus that of the unpruned model
on the same examples, or MME's total minus the unpruned model's. Both are means of one value for
each example, so that candidates are compared in the same way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from offline_search.candidates import BASE_PARENT
from offline_search.components import structure
from offline_search.ledger import ProposalRecord, TrialRecord
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.statistics import Floats
from vllm_autoprune.tpdsl.state import PruningState


@dataclass(frozen=True, slots=True)
class Answers:
    """Log-probability of each reference answer, and whether greedy decoding gives it."""

    logprob: tuple[float, ...] = ()
    right: tuple[bool, ...] = ()

    def __add__(self, other: Answers) -> Answers:
        return Answers(self.logprob + other.logprob, self.right + other.right)

    def __len__(self) -> int:
        return len(self.logprob)

    @property
    def accuracy(self) -> float:
        """Share of examples answered correctly by greedy decoding."""
        return sum(self.right) / len(self.right)

    def mme_shares(self, examples: Sequence[Example]) -> Floats:
        """Share of each answered example in MME's total, ``(M,)``, in thousand points.

        The total is accuracy and accuracy+ of each category in per cent, summed, and the mean of
        these shares over all ``examples`` of the split. The examples that accuracy+ takes together
        count where all of them answered so far are right.
        """
        paired = {example.category for example in examples if example.pair is not None}
        questions = Counter(example.category for example in examples)
        keys = [
            None
            if example.pair is None and example.category in paired
            else (example.category, example.image, example.pair)
            for example in examples
        ]
        sizes = Counter(key for key in keys if key is not None)
        groups = Counter(category for category, *_ in sizes)
        wrong = {key for key, right in zip(keys, self.right, strict=False) if not right}
        values = []
        for example, key, right in zip(examples, keys, self.right, strict=False):
            value = right / questions[example.category]
            if key is not None and key not in wrong:
                value += 1 / (sizes[key] * groups[example.category])
            values.append(value)
        return len(examples) * np.asarray(values) / 10

    def relative_to(
        self, full: Answers, examples: Sequence[Example], objective: str = "quality"
    ) -> Floats:
        """Value of each answered example ``(M,)`` less the unpruned model's: the objective's terms.

        ``examples`` are those of the whole split.
        """
        count = len(self)
        if objective == "mme":
            full = Answers(full.logprob[:count], full.right[:count])
            return self.mme_shares(examples) - full.mme_shares(examples)
        return np.subtract(self.logprob, full.logprob[:count])


def paired_error(examples: Sequence[Example], gaps: Floats) -> float:
    """Standard error of the mean of paired differences ``(M,)``, clustered by image."""
    _, places = np.unique([example.image for example in examples[: len(gaps)]], return_inverse=True)
    sums = np.bincount(places, gaps - gaps.mean())
    if len(sums) < 2:
        return float("inf")
    return math.sqrt(len(sums) / (len(sums) - 1) * float(sums @ sums)) / len(gaps)


FAILURES_TO_GIVE_UP = 25
"""Invalid or unsafe candidates in a row after which a search ends: more would only cost."""


def gave_up(results: Sequence[TrialRecord]) -> bool:
    """Whether the last of a search's trials were invalid or unsafe, as many as end it."""
    last = results[-FAILURES_TO_GIVE_UP:]
    failed = all(result.status in ("invalid", "unsafe") for result in last)
    return failed and len(last) == FAILURES_TO_GIVE_UP


@dataclass(frozen=True)
class Trial:
    """A candidate with its result; ``values`` ``(M,)`` are those of the answered examples."""

    proposal: ProposalRecord
    result: TrialRecord
    state: PruningState | None = None
    values: Floats | None = None

    @property
    def name(self) -> str:
        """``round.index``."""
        return self.proposal.name

    @property
    def score(self) -> float:
        """The objective of a fully evaluated trial; raises :class:`ValueError` for others."""
        if self.result.score is None:
            raise ValueError(f"candidate {self.name} was not evaluated to the end")
        return self.result.score

    def require_state(self) -> PruningState:
        """The state, which every trial that was measured has."""
        if self.state is None:
            raise ValueError(f"candidate {self.name} has no state")
        return self.state


@dataclass
class History:
    """Trials in order of proposal, after that of the base policy alone."""

    base: Trial
    trials: list[Trial] = field(default_factory=list)
    examples: Sequence[Example] = ()
    names_bases: bool = False
    """Whether a language model chooses among base policies, which prompts then name."""

    @property
    def base_values(self) -> Floats:
        """Values of the base policy, ``(M,)``."""
        assert self.base.values is not None, "a search begins with the base policy's measurement"
        return self.base.values

    def evaluated(self) -> list[Trial]:
        """Trials that were evaluated on the whole search split, in order of proposal."""
        return [trial for trial in self.trials if trial.result.score is not None]

    def ranked(self) -> list[Trial]:
        """Evaluated trials, best objective first; earlier trials first among equals."""
        return sorted(self.evaluated(), key=lambda trial: -trial.score)

    def ranked_structures(self) -> list[Trial]:
        """The best trial of each structure of states, in order of rank."""
        best: dict[tuple[str, ...], Trial] = {}
        for trial in self.ranked():
            if trial.state is not None:
                best.setdefault(structure(trial.state), trial)
        return list(best.values())

    def best(self) -> Trial | None:
        """The trial with the highest objective so far."""
        return next(iter(self.ranked()), None)

    def find(self, name: str) -> Trial | None:
        """The trial of a name; the base policy's for its own."""
        trials = (trial for trial in self.trials if trial.name == name)
        return self.base if name == BASE_PARENT else next(trials, None)

    def find_measured(self, name: str) -> Trial | None:
        """The trial of a name, or the one that it duplicates."""
        trial = self.find(name)
        repeats = trial is not None and trial.result.status == "same"
        return self.find_measured(trial.result.same_as) if trial and repeats else trial

    def objective_of(self, name: str) -> float | None:
        """The objective of a trial, or of the trial that it duplicates."""
        trial = self.find_measured(name)
        return None if trial is None else self.estimate(trial)

    def values_of(self, name: str) -> Floats | None:
        """The values of a trial, or of the trial that it duplicates."""
        trial = self.find_measured(name)
        return None if trial is None else trial.values

    def estimate(self, trial: Trial) -> float | None:
        """The objective of a trial, estimated where the race ended before its last example.

        The examples that a dropped trial was measured on are corrected for their difficulty: the
        difference between all examples and these, averaged over all fully evaluated trials.
        """
        if trial.result.score is not None or trial.values is None or not len(trial.values):
            return trial.result.score
        known = [other.values for other in self.evaluated() if other.values is not None]
        mean = np.mean([self.base_values, *known], axis=0)
        count = len(trial.values)
        return float(trial.values.mean() + mean.mean() - mean[:count].mean())

    def best_values(self) -> Floats:
        """Values of the best trial, or of the base policy if that is at least as good."""
        best, base = self.best(), self.base.result.score
        if best is None or best.values is None or (base is not None and best.score <= base):
            return self.base_values
        return best.values
