"""Answers of one policy to a sequence of examples, and the scores computed from them.

The objective is the mean log-probability of the reference answer minus that of the unpruned model
on the same examples, or MME's total minus the unpruned model's. Both are means of one value for
each example, so that candidates are compared in the same way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from offline_search.candidates import BASE_PARENT
from offline_search.components import structure
from offline_search.differences import (
    Difference,
    PairedDifference,
    Strata,
    compare,
    compare_paired,
    count_decimals,
    fit_difficulty,
)
from offline_search.ledger import Exchange, ProposalRecord, Standing, TrialRecord
from offline_search.models import mask_models
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.statistics import Floats, round_portably
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

        The total sums accuracy and accuracy+ of all categories in per cent; it is the mean of these
        shares over all ``examples`` of the split. Accuracy+ counts a group of examples, such as a
        pair, if all of those answered so far are right.
        """
        paired = {example.stratum for example in examples if example.pair is not None}
        questions = Counter(example.stratum for example in examples)
        keys = [
            None
            if example.pair is None and example.stratum in paired
            else (example.stratum, example.image, example.pair)
            for example in examples
        ]
        sizes = Counter(key for key in keys if key is not None)
        groups = Counter(category for category, *_ in sizes)
        answered = list(zip(keys, self.right, strict=False))
        wrong = {key for key, correct in answered if not correct}
        values = []
        for example, (key, correct) in zip(examples, answered, strict=False):
            value = correct / questions[example.stratum]
            if key is not None and key not in wrong:
                value += 1 / (sizes[key] * groups[example.stratum])
            values.append(value)
        return len(examples) * np.asarray(values) / 10

    def relative_to(
        self, full: Answers, examples: Sequence[Example], objective: str = "quality"
    ) -> Floats:
        """Terms of the objective ``(M,)``: the value of each answered example minus ``full``'s.

        ``full`` has the unpruned model's answers; ``examples`` are those of the whole split.
        """
        count = len(self)
        if objective == "mme":
            full = Answers(full.logprob[:count], full.right[:count])
            return self.mme_shares(examples) - full.mme_shares(examples)
        return np.subtract(self.logprob, full.logprob[:count])


def rounded_mean(values: Sequence[float]) -> float:
    """Mean, rounded to the six decimals that records have."""
    return round_portably(sum(values) / len(values), 6)


FAILURES_TO_GIVE_UP = 25
"""Number of invalid or unsafe candidates in a row after which a search ends."""


def gave_up(results: Sequence[TrialRecord]) -> bool:
    """Whether the last :data:`FAILURES_TO_GIVE_UP` trials were all invalid or unsafe."""
    last = results[-FAILURES_TO_GIVE_UP:]
    failed = all(result.status in ("invalid", "unsafe") for result in last)
    return failed and len(last) == FAILURES_TO_GIVE_UP


@dataclass(frozen=True)
class Trial:
    """A candidate with its result.

    ``values`` ``(M,)`` has the value of each question of the pool, NaN if it was not asked. If it
    is shorter, it has those of the first questions.
    """

    proposal: ProposalRecord
    result: TrialRecord
    state: PruningState | None = None
    values: Floats | None = None
    exchanges: Mapping[str, Exchange] = field(default_factory=dict)
    """What it exchanges on probes, by model."""

    @property
    def name(self) -> str:
        """``round.index``, or the base policy's."""
        return self.proposal.name if self.proposal.round else BASE_PARENT

    @property
    def score(self) -> float:
        """The objective of a fully evaluated trial; raises :class:`ValueError` for others."""
        if self.result.score is None:
            raise ValueError(f"candidate {self.name} was not evaluated to the end")
        return self.result.score

    def require_state(self) -> PruningState:
        """The state of the trial; a trial that was measured always has one."""
        if self.state is None:
            raise ValueError(f"candidate {self.name} has no state")
        return self.state


@dataclass(frozen=True, slots=True)
class CategoryMean:
    """Mean value of a trial over the ``questions`` of a category that it was asked.

    ``base`` is the mean of the base policy over the same questions, and ``estimate`` that of the
    trial over all questions of the category, corrected for their difficulty.
    """

    questions: int
    value: float
    base: float
    estimate: float


_MAX_LEADERS = 3
"""Largest number of leaders, of different structures, that are asked every round's questions."""


@dataclass
class History:
    """Trials in order of proposal, after that of the base policy alone."""

    base: Trial
    trials: list[Trial] = field(default_factory=list)
    examples: Sequence[Example] = ()
    names_bases: bool = False
    """Whether a language model chooses among base policies, so that prompts have to name them."""
    resolution: float = 0.0
    """Difference in the objective below which candidates are tied."""
    answers: int = 0
    """Number of answers by candidates, including further questions to leaders and parents."""
    _difficulty: Floats = field(default_factory=lambda: np.empty(0))
    _fitted: list[Floats] = field(default_factory=list)
    """Arrays that the difficulty was fitted to; they are kept so that their ids stay unique."""

    def values_of(self, name: str) -> Floats | None:
        """The values ``(M,)`` of a trial, or of the trial that it duplicates."""
        trial = self.find_measured(name)
        return None if trial is None else self.values(trial)

    def values(self, trial: Trial) -> Floats | None:
        """The values ``(M,)`` of a trial."""
        values = trial.values
        count = len(self.base_values)
        if values is None or len(values) == count:
            return values
        return np.pad(values, (0, count - len(values)), constant_values=np.nan)

    def count_questions(self, trial: Trial) -> int:
        """Number of questions that a trial was asked."""
        return 0 if trial.values is None else int(np.isfinite(trial.values).sum())

    @property
    def base_values(self) -> Floats:
        """Values of the base policy, ``(M,)``."""
        assert self.base.values is not None, (
            "a search begins with the base policy's measurement"
        )
        return self.base.values

    def evaluated(self) -> list[Trial]:
        """Trials that were asked all questions of their round, in order of proposal."""
        return [trial for trial in self.trials if trial.result.score is not None]

    def ranked(self) -> list[Trial]:
        """Evaluated trials, best estimate first; earlier trials first among equals."""
        estimates = {
            trial.name: self.estimate(trial) or 0.0 for trial in self.evaluated()
        }
        return sorted(self.evaluated(), key=lambda trial: -estimates[trial.name])

    def ranked_structures(self) -> list[Trial]:
        """The best trial of each structure of states, in order of rank."""
        best: dict[tuple[str, ...], Trial] = {}
        for trial in self.ranked():
            if trial.state is not None:
                best.setdefault(structure(trial.state), trial)
        return list(best.values())

    def best(self) -> Trial | None:
        """The trial with the highest estimate so far."""
        return next(iter(self.ranked()), None)

    def latest(self) -> list[Trial]:
        """The trials of the last round."""
        last = max((trial.proposal.round for trial in self.trials), default=0)
        return [trial for trial in self.trials if trial.proposal.round == last]

    def leader(self) -> Trial:
        """The best trial, or the base policy if that is at least as good."""
        best = self.best()
        if best is None:
            return self.base
        base = self.estimate(self.base)
        is_behind = base is not None and (self.estimate(best) or 0.0) <= base
        return self.base if is_behind else best

    def leaders(self) -> list[Trial]:
        """The best trial, and those of other structures that more answers could put before it."""
        best, *rivals = self.ranked_structures()[:_MAX_LEADERS] or [self.base]
        leaders = [best]
        for rival in rivals:
            gap = self.compare(rival, best)
            if gap.verdict(self.resolution) == "undecided":
                leaders.append(rival)
        return leaders

    def tied(self) -> list[Trial]:
        """The best trial of each structure, unless it is known to be worse than the leader."""
        leader = self.leader()
        return [
            trial
            for trial in self.ranked_structures()
            if trial is not leader
            and self.compare(trial, leader).verdict(self.resolution)
            in ("same", "undecided")
        ]

    def find(self, name: str) -> Trial | None:
        """The trial with ``name``, which may be the base policy's; None if there is none."""
        trials = (trial for trial in (self.base, *self.trials) if trial.name == name)
        return next(trials, None)

    def find_measured(self, name: str) -> Trial | None:
        """The trial with ``name``, or the trial that it duplicates."""
        trial = self.find(name)
        if trial is not None and trial.result.status == "same":
            return self.find_measured(trial.result.same_as)
        return trial

    def add_values(self, name: str, block: slice, values: Floats) -> None:
        """Set the values ``(m,)`` of a trial, or of the base policy, on a block's questions."""
        trial = self.find(name)
        assert trial is not None, "only what was measured is asked again"
        merged = np.full(len(self.base_values), np.nan)
        if trial.values is not None:
            merged = trial.values.copy()
        merged[block.start : block.start + len(values)] = values
        updated = replace(trial, values=merged)
        if trial is self.base:
            self.base = updated
        else:
            names = [trial.name for trial in self.trials]
            self.trials[names.index(name)] = updated

    def objective_of(self, name: str) -> float | None:
        """The estimate of a trial, or of the trial that it duplicates."""
        trial = self.find_measured(name)
        return None if trial is None else self.estimate(trial)

    def difficulty(self) -> Floats:
        """Effects of the questions ``(M,)`` on the base policy and all fully evaluated trials.

        It is fitted by category, because a candidate may gain in one and lose in another.
        """
        rows = [self.base_values]
        for trial in self.evaluated():
            values = self.values(trial)
            if values is not None:
                rows.append(values)
        if [*map(id, rows)] != [*map(id, self._fitted)]:
            table = np.array(rows)
            self._difficulty = np.empty(table.shape[1])
            codes = self._strata().codes
            for code in np.unique(codes):
                columns = codes == code
                self._difficulty[columns] = fit_difficulty(table[:, columns])
            self._fitted = rows
        return self._difficulty

    def estimate(self, trial: Trial) -> float | None:
        """Estimate of a trial's objective over all questions that any trial was asked so far.

        The trial's mean is corrected for the difficulty of its questions and weighted by the shares
        of the categories, so that it is the weighted mean of :meth:`by_category`.
        """
        values = self.values(trial)
        if values is None or not np.isfinite(values).any():
            return trial.result.score
        difficulty = self.difficulty()
        answered = np.isfinite(values)
        weights = self._strata().weights(answered)[answered]
        level = float(weights @ (values - difficulty)[answered])
        return round_portably(level + float(np.nanmean(difficulty)), 6)

    def compare(self, trial: Trial, reference: Trial) -> Difference:
        """Difference between the estimates of two trials; its error is infinite if one has none."""
        values = self.values(trial)
        reference_values = self.values(reference)
        if values is None or reference_values is None or not self.examples:
            return Difference(0.0, math.inf)
        return compare(
            self.examples, values, reference_values, self.difficulty(), self._strata()
        )

    def compare_paired(self, trial: Trial, reference: Trial) -> PairedDifference:
        """Difference of two trials over the questions that both were asked."""
        values = self.values(trial)
        reference_values = self.values(reference)
        if values is None or reference_values is None or not self.examples:
            return PairedDifference(Difference(0.0, math.inf), 0, 0, 0)
        return compare_paired(self.examples, values, reference_values)

    def usual_resolution(self) -> float:
        """The resolution; of a search without one, what all its questions can tell apart."""
        return self.resolution or self.reach(max(self.count_questions(self.base), 1))

    def count_decimals(self) -> int:
        """Decimals of all figures of a prompt: two digits of the usual error of a difference."""
        errors = [
            self.compare_paired(trial, self.base).mean.error for trial in self.trials
        ]
        usual = [error for error in errors if 0 < error < math.inf]
        if not usual:
            values = self.base_values[self._population()]
            usual = [float(values.std()) / math.sqrt(len(values))]
        return count_decimals(float(np.median(usual)))

    def count_categories(self) -> dict[str, int]:
        """Number of questions by category that any trial was asked so far."""
        rows = np.flatnonzero(self._population())
        return dict(Counter(self.examples[row].stratum for row in rows))

    def by_category(self, trial: Trial) -> dict[str, CategoryMean]:
        """Means of a trial's values in the categories that it was asked questions of.

        Weighted by the numbers of questions, their estimates give :meth:`estimate`.
        """
        values = self.values(trial)
        means = dict[str, CategoryMean]()
        if values is None:
            return means
        names = np.array([example.stratum for example in self.examples])
        difficulty = self.difficulty()
        for name in self.count_categories():
            rows = np.flatnonzero((names == name) & np.isfinite(values))
            if rows.size:
                level = (values - difficulty)[rows].mean()
                estimate = level + np.nanmean(difficulty[names == name])
                means[name] = CategoryMean(
                    questions=len(rows),
                    value=round_portably(float(values[rows].mean())),
                    base=round_portably(float(self.base_values[rows].mean())),
                    estimate=round_portably(float(estimate)),
                )
        return means

    def gains_by_model(self, trial: Trial) -> dict[str, float]:
        """Mean gain of a trial over the base policy on each of several models, where asked."""
        values = self.values(trial)
        gains = dict[str, float]()
        if values is None:
            return gains
        for name, mask in mask_models(self.examples).items():
            rows = mask & np.isfinite(values)
            if rows.any():
                mean = float((values - self.base_values)[rows].mean())
                gains[name] = round_portably(mean)
        return gains

    def _population(self) -> NDArray[np.bool_]:
        """Mask ``(M,)`` of the questions asked so far, all of which the base policy was asked."""
        return np.isfinite(self.base_values)

    def _strata(self) -> Strata:
        """Strata by category; a single stratum if the categories are not known."""
        population = self._population()
        if len(self.examples) == len(population):
            return Strata.of(self.examples, population)
        return Strata(np.zeros(len(population), dtype=np.int64), np.ones(1))

    def reach(self, questions: int) -> float:
        """Two standard errors of the difference between leaders that answer ``questions``."""
        best, *rivals = self.ranked_structures()[: 2 * _MAX_LEADERS] or [self.base]
        deviations: list[float] = []
        for rival in rivals or [self.base]:
            count = min(self.count_questions(best), self.count_questions(rival))
            error = self.compare(rival, best).error
            if 0 < error < math.inf:
                deviations.append(error * math.sqrt(count))
        if not deviations:
            return 0.0
        reach = 2 * float(np.median(deviations)) / math.sqrt(questions)
        return round_portably(reach, 6)

    def leads(self, start: int, end: int) -> list[Difference]:
        """Lead of the best trial of each round ``start`` to ``end`` over the best one before.

        Empty if nothing was evaluated before ``start``, or if a round has no measured trial.
        """
        ranked = self.ranked()
        earlier = [trial for trial in ranked if trial.proposal.round < start]
        if not earlier:
            return []
        leads: list[Difference] = []
        for number in range(start, end + 1):
            proposed = [
                trial for trial in self.trials if trial.proposal.round == number
            ]
            if all(trial.result.failed for trial in proposed):
                return []
            best = [trial for trial in ranked if trial.proposal.round == number]
            lead = Difference(-math.inf, 0)
            if best:
                lead = self.compare(best[0], earlier[0])
            leads.append(lead)
        return leads

    def standing(self, plateaus: int) -> Standing:
        """The leader and the trials tied with it; ``plateaus`` is the level of the plateau."""
        leader = self.leader()
        gain = self.compare(leader, self.base)
        return Standing(
            best=leader.name,
            objective=self.estimate(leader) or 0.0,
            gain=round(gain.value, 6),
            error=round(gain.error, 6) if math.isfinite(gain.error) else 0.0,
            tied=tuple(trial.name for trial in self.tied()),
            resolution=self.resolution,
            answers=self.answers,
            plateaus=plateaus,
        )

    def best_values(self) -> Floats:
        """Values of the leader."""
        values = self.values(self.leader())
        return self.base_values if values is None else values
