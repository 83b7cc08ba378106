"""Answers of one policy to a sequence of examples, and the scores computed from them.

The objective is the mean log-probability of the reference answer minus that of the unpruned model
on the same examples, or MME's total minus the unpruned model's.
Both are means of one value for each example, so that candidates are compared in the same way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from offline_search.candidates import BASE_PARENT
from offline_search.components import Candidate, SelectionProgram, structure
from offline_search.ledger import ProposalRecord, TrialRecord
from offline_search.settings import Settings
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.statistics import ClusterBootstrap, Estimate, Floats, estimate
from vllm_autoprune.tpdsl.state import PruningState


@dataclass(frozen=True, slots=True)
class Answers:
    """Log-probability of each reference answer, and whether greedy decoding gives it."""

    logprob: tuple[float, ...]
    right: tuple[bool, ...]

    def __add__(self, other: Answers) -> Answers:
        return Answers(self.logprob + other.logprob, self.right + other.right)

    def __len__(self) -> int:
        return len(self.logprob)


NO_ANSWERS = Answers((), ())


def describe_objective(settings: Settings) -> str:
    """What the objective of a search is, with its unit."""
    unit = objective_unit(settings)
    if settings.objective == "mme":
        return f"MME's total less that of the model with all tokens, in {unit}"
    return f"mean log-probability of the reference answer less the full-token model's, in {unit}"


def objective_unit(settings: Settings) -> str:
    """The unit of the objective."""
    return "thousand points" if settings.objective == "mme" else "nats"


def relative_values(
    settings: Settings, examples: Sequence[Example], answers: Answers, full: Answers
) -> Floats:
    """Value of each answered example ``(M,)`` less that of the unpruned model; their mean counts.

    ``examples`` are those of the whole split. For MME's total a value is the example's share in it.
    """
    if settings.objective != "mme":
        return relative_logprob(answers, full)
    right = full.right[: len(answers)]
    gaps: Floats = _mme_shares(examples, answers.right) - _mme_shares(examples, right)
    return gaps


def relative_logprob(answers: Answers, full: Answers) -> Floats:
    """Log-probability of each reference answer minus the unpruned model's, ``(M,)``."""
    count = len(answers)
    gaps: Floats = np.asarray(answers.logprob) - np.asarray(full.logprob[:count])
    return gaps


def _mme_shares(examples: Sequence[Example], right: Sequence[bool]) -> Floats:
    """Share of each answered example in accuracy and accuracy+ of its category, in thousand points.

    Their mean over all examples is MME's total. The examples that accuracy+ takes together count
    where all of them answered so far are right.
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
    wrong = {key for key, correct in zip(keys, right, strict=False) if not correct}
    values = []
    for example, key, correct in zip(examples, keys, right, strict=False):
        value = correct / questions[example.category]
        if key is not None and key not in wrong:
            value += 1 / (sizes[key] * groups[example.category])
        values.append(value)
    return len(examples) * np.asarray(values) / 10


def accuracy(answers: Answers) -> float:
    """Share of examples answered correctly by greedy decoding."""
    return sum(answers.right) / len(answers.right)


def accuracy_plus(examples: Sequence[Example], answers: Answers) -> float:
    """MME's accuracy+: share of pairs with both answers right, or of images without pairs."""
    groups: dict[tuple[str, int | str], bool] = {}
    paired = any(example.pair is not None for example in examples)
    for example, right in zip(examples, answers.right, strict=False):
        if paired and example.pair is None:
            continue
        key = (example.image, example.pair if example.pair is not None else "")
        groups[key] = groups.get(key, True) and right
    return sum(groups.values()) / len(groups) if groups else 0.0


def mme_total(examples: Sequence[Example], answers: Answers) -> float:
    """MME's total score: accuracy and accuracy+ of each category in per cent, summed."""
    return 1000 * float(_mme_shares(examples, answers.right).mean())


def bootstrap_mean(examples: Sequence[Example], values: Floats) -> Estimate:
    """Mean with its 95 % bootstrap interval, clustered by image, rounded to six decimals."""
    bootstrap = ClusterBootstrap([example.image for example in examples])
    return estimate(bootstrap.mean(values)).rounded(6)


def paired_error(examples: Sequence[Example], gaps: Floats) -> float:
    """Standard error of the mean of paired differences ``(M,)``, clustered by image."""
    _, places = np.unique([example.image for example in examples[: len(gaps)]], return_inverse=True)
    sums = np.bincount(places, gaps - gaps.mean())
    if len(sums) < 2:
        return float("inf")
    return math.sqrt(len(sums) / (len(sums) - 1) * float(sums @ sums)) / len(gaps)


def significantly_below(examples: Sequence[Example], values: Floats, reference: Floats) -> bool:
    """Whether the paired mean difference to a reference is more than three standard errors below 0.

    Three instead of two, because a race tests every candidate several times. Never with fewer than
    four images.
    """
    gaps = values - reference[: len(values)]
    if len({example.image for example in examples[: len(gaps)]}) < 4:
        return False
    return bool(gaps.mean() + 3 * paired_error(examples, gaps) < 0)


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
        candidate = self.selection if self.state is None else self.state
        if candidate is None:
            raise ValueError(f"candidate {self.name} is invalid")
        return candidate


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
        repeats = trial.result.status == "same"
        return self.values_of(trial.result.same_as) if repeats else trial.values

    def estimate(self, trial: Trial) -> float | None:
        """The objective of a trial, estimated where the race ended before its last example.

        The examples that a dropped trial was measured on are corrected for their difficulty: the
        difference between all examples and these, averaged over all fully evaluated trials.
        """
        if trial.objective is not None or trial.values is None or not len(trial.values):
            return trial.objective
        known = [other.values for other in self.evaluated() if other.values is not None]
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


def best_of_each_structure(ranked: Sequence[Trial]) -> list[Trial]:
    """The best trial of each structure, in order of rank."""
    best: dict[tuple[str, ...], Trial] = {}
    for trial in ranked:
        best.setdefault(structure(trial.require_state()), trial)
    return list(best.values())
