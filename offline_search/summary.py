"""Summary H_t of Algorithm 2: the measurements of all rounds so far, as prompts present them.

Scores and differences are explained once, in :mod:`offline_search.task`. Every candidate that is
named is printed once: as changes of its parent if the parent is printed, else as a whole.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from statistics import median

import numpy as np
from pydantic import JsonValue

from offline_search.candidates import BASE_PARENT, Expectation
from offline_search.components import BASE, compact_json, components_json
from offline_search.differences import Difference, Verdict
from offline_search.history import History, Trial
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.transfer import Change, list_changes

_MAX_BEST = 10
"""Number of best candidates, of different structures, that a summary lists."""

_MAX_ROUNDS = 10
"""Number of last rounds whose scores a summary lists."""

_MAX_FAILURES = 3
_MAX_CHANGES = 6
_MAX_DROPPED = 8

_CANDIDATES = (
    "Candidates: score, on how many questions (difference to {leader}, which leads; scores by "
    "category ± their standard errors; on how many questions it is better and worse than its "
    "parent{exchanges}); policy."
)
_EXCHANGES = (
    "; tokens that it exchanges, and quality of the lowest pick and of the best other token, "
    "means over images"
)
_TITLE_OF_BEST = (
    "Best candidates of different structures (a structure is the names of all atoms):"
)

_SAME = 0.01
"""Difference in a value below which two answers count as equally good."""

_OUTCOMES: Mapping[Verdict, Expectation] = {
    "better": "higher",
    "worse": "lower",
    "same": "same",
}
"""The expectation that each verdict confirms."""


def summarize(history: History) -> str:
    """The summary H_t: loss by category, trend, best, last and dropped candidates, failures."""
    return "\n".join(_Summary(history).lines())


def format_score(value: float | None) -> str:
    """A score as prompts show it: an objective in thousandths."""
    return "not measured" if value is None else f"{round(1000 * value):+d}"


@dataclass(frozen=True)
class _Summary:
    """The parts of the summary of one history."""

    history: History

    @cached_property
    def leader(self) -> Trial:
        """The best candidate, or the base policy."""
        return self.history.leader()

    @cached_property
    def best(self) -> Sequence[Trial]:
        """The best candidate of each structure."""
        return self.history.ranked_structures()[:_MAX_BEST]

    @cached_property
    def latest(self) -> Sequence[Trial]:
        """The candidates of the last round."""
        trials = self.history.trials
        last = max((trial.proposal.round for trial in trials), default=0)
        return [trial for trial in trials if trial.proposal.round == last]

    @cached_property
    def sections(self) -> Mapping[str, Sequence[Trial]]:
        """Candidates to print by title of the section; each is in the first section that fits."""
        history = self.history
        parents = {name for trial in self.latest for name in trial.proposal.parents[:1]}
        same_as = {
            trial.result.same_as
            for trial in self.latest
            if trial.result.status == "same"
        }
        dropped = [
            trial for trial in history.trials if trial.result.status == "dropped"
        ]
        by_title: Mapping[str, Sequence[Trial]] = {
            _TITLE_OF_BEST: self.best,
            "Others of the last round:": self.latest,
            "Others that these name:": [
                trial for trial in history.trials if trial.name in parents | same_as
            ],
            "Dropped in earlier rounds; the same policy is not measured again:": dropped[
                -_MAX_DROPPED:
            ],
        }
        printed = set[str]()
        sections: dict[str, Sequence[Trial]] = {}
        for title, trials in by_title.items():
            sections[title] = [
                trial
                for trial in trials
                if trial.state is not None and trial.name not in printed
            ]
            printed |= {trial.name for trial in sections[title]}
        return sections

    @cached_property
    def printed(self) -> Mapping[str, Trial]:
        """The candidates that are printed, and the base policy, by name."""
        trials = chain([self.history.base], *self.sections.values())
        return {trial.name: trial for trial in trials}

    def lines(self) -> Iterator[str]:
        """The summary, line by line."""
        history = self.history
        count = history.count_questions(history.base)
        resolution = 1000 * history.resolution
        meaning = "" if resolution else " (only equal scores are the same)"
        yield f"Questions asked so far: {count}. Resolution: {resolution:.0f}{meaning}."
        yield f"Base policy alone ({BASE_PARENT}): {format_score(history.estimate(history.base))}."
        yield from self._describe_categories()
        yield from self._describe_trend()
        if any(self.sections.values()):
            probed = any(trial.exchanges is not None for trial in self.printed.values())
            yield _CANDIDATES.format(
                leader=self.leader.name, exchanges=_EXCHANGES if probed else ""
            )
        for title, trials in self.sections.items():
            if trials:
                yield title
            for trial in trials:
                yield f"- {self._describe(trial)}"
        yield from self._describe_ties()
        yield from self._describe_hypotheses()
        yield from self._describe_failures()

    def _describe_categories(self) -> Iterator[str]:
        """A row for each category, with the question in it that the leader answers worst."""
        history = self.history
        if not history.examples:
            return
        leader = self.leader
        counts = history.count_categories()
        base = history.by_category(history.base)
        scores = history.by_category(leader)
        losses = {name: counts[name] * gap.value for name, gap in scores.items()}
        total = sum(losses.values())
        columns = f"score of base, score of {leader.name}"
        if leader is history.base:
            columns = "score of base"
        yield (
            f"Category: questions, {columns}, share of the loss of {leader.name}; the question "
            "that it loses most at:"
        )
        for name in sorted(counts, key=lambda name: losses.get(name, 0.0)):
            figures = [str(counts[name]), format_score(base[name].value)]
            if leader is not history.base:
                known = name in scores
                figures.append(
                    format_score(scores[name].value) if known else "not asked"
                )
            share = losses.get(name, 0.0) / total if total else 0.0
            figures.append(f"{round(100 * share)}%")
            yield f"- {name}: {', '.join(figures)}; {self._find_worst_question(name)}"

    def _find_worst_question(self, category: str) -> str:
        """The question of a category on which the leader, or else the base policy, loses most."""
        history = self.history
        values = history.best_values()
        rows = [
            row
            for row, example in enumerate(history.examples)
            if example.category == category
        ]
        answered = [row for row in rows if np.isfinite(values[row])]
        if not answered:
            values = history.base_values
            answered = [row for row in rows if np.isfinite(values[row])]
        worst = min(answered, key=lambda row: values[row])
        return json.dumps(history.examples[worst].question, ensure_ascii=False)

    def _describe_trend(self) -> Iterator[str]:
        """Scores of the candidates of the last rounds, from the second round on."""
        rounds: dict[int, list[float]] = {}
        for trial in self.history.trials:
            score = self.history.estimate(trial)
            if score is not None:
                rounds.setdefault(trial.proposal.round, []).append(score)
        if len(rounds) > 1:
            scores = [
                f"{number}: {format_score(max(values))}, {format_score(median(values))}"
                for number, values in rounds.items()
            ]
            yield (
                "Best and median score of each round's candidates, as estimated now: "
                f"{'; '.join(scores[-_MAX_ROUNDS:])}."
            )

    def _describe(self, trial: Trial) -> str:
        """One candidate on one line: score, differences, what it did, and its policy."""
        status = trial.result.status
        policy = self._describe_policy(trial)
        if status == "same":
            score = format_score(self.history.objective_of(trial.name))
            twin = f"of {trial.result.same_as}, whose tokens and rows it has"
            return f"{trial.name}: {score} {twin}; {policy}"
        if trial.values is None:
            return f"{trial.name}: not measured, {trial.result.reason[:100]}; {policy}"
        count = self.history.count_questions(trial)
        score = f"{format_score(self.history.estimate(trial))} on {count} questions"
        if status == "dropped":
            score += f", then dropped: {trial.result.reason}"
        figures = "; ".join(self._list_figures(trial))
        return f"{trial.name}: {score} ({figures}); {policy}"

    def _list_figures(self, trial: Trial) -> Iterator[str]:
        """Differences, scores by category, exchanges and idle parts of a measured candidate."""
        history = self.history
        if trial is not self.leader and history.examples:
            yield self._format_difference(history.compare(trial, self.leader))
        for name, gap in history.by_category(trial).items():
            error = f" ± {1000 * gap.error:.0f}" if np.isfinite(gap.error) else ""
            yield f"{name} {format_score(gap.value)}{error}"
        yield from self._count_changed(trial)
        state = trial.require_state()
        if trial.exchanges is not None and not _is_idle(state):
            yield f"exchanges {trial.exchanges:.1f} tokens"
        if trial.quality is not None:
            lowest, highest = trial.quality
            yield f"quality {lowest:.2f} and {highest:.2f}"
        if not _is_idle(state):
            yield from (
                f"{call.atom} has weight 0"
                for call in state.scoring.signals
                if not call.weight
            )
        if state.reassembly.idle:
            yield "reassembly changes no row"

    def _count_changed(self, trial: Trial) -> Iterator[str]:
        """Numbers of questions on which a candidate is better or worse than its printed parent."""
        parent = (*trial.proposal.parents[:1], BASE_PARENT)[0]
        reference = self.history.values_of(parent)
        values = self.history.values(trial)
        if parent not in self.printed or reference is None or values is None:
            return
        gaps = values - reference
        shared = int(np.isfinite(gaps).sum())
        better = int(np.sum(gaps > _SAME))
        worse = int(np.sum(gaps < -_SAME))
        if shared:
            yield f"of {shared}, {better} better, {worse} worse than {parent}"

    def _describe_policy(self, trial: Trial) -> str:
        """The candidate as changes of a parent that is printed, or as a whole."""
        state = trial.require_state()
        names_bases = self.history.names_bases
        if _is_idle(state):
            acting = compact_json(state, names_bases)
            acting.pop("scoring", None)
            acting.pop("constraints", None)
            return f"exchanges nothing, with {_dump(acting)}"
        parent = self.printed.get((*trial.proposal.parents, "")[0])
        # Changes of a scoring that is not printed would not be understood.
        if parent is not None and parent.state and not _is_idle(parent.state):
            old = components_json(parent.state)
            new = components_json(state)
            if names_bases:
                old[BASE] = {"name": parent.state.base_policy.name}
                new[BASE] = {"name": state.base_policy.name}
            changes = list_changes(old, new)
            if len(changes) <= _MAX_CHANGES:
                texts = [_describe_change(change, old, new) for change in changes]
                return f"{parent.name} with {', '.join(texts) or 'no change'}"
        return _dump(compact_json(state, names_bases))

    def _describe_ties(self) -> Iterator[str]:
        """The candidates that may score as high as the leader."""
        tied = self.history.tied() if self.history.resolution else []
        if tied:
            names = ", ".join(trial.name for trial in tied[:_MAX_BEST])
            yield f"Not known to differ from {self.leader.name}: {names}."

    def _describe_hypotheses(self) -> Iterator[str]:
        """One line for each hypothesis of the last round."""
        tested = [trial for trial in self.latest if trial.proposal.hypothesis]
        if tested:
            yield "Hypotheses of the last round, with the difference to the parent:"
        for trial in tested:
            yield f"- {self._describe_hypothesis(trial)}"

    def _describe_hypothesis(self, trial: Trial) -> str:
        """A hypothesis, the difference that tests it, and the verdict on it."""
        history = self.history
        hypothesis = trial.proposal.hypothesis
        assert hypothesis is not None
        parent = trial.proposal.parents[0] if trial.proposal.parents else BASE_PARENT
        purpose = f"{hypothesis.purpose or 'no purpose'} of {parent}, expected {hypothesis.expect}"
        measured = history.find_measured(trial.name)
        reference = history.find_measured(parent)
        if measured is None or history.estimate(measured) is None:
            result = trial.result
            outcome = f"not measured, {result.status}: {result.reason[:100]}"
        elif reference is None or reference.values is None:
            outcome = "untested, the parent was not measured"
        elif measured is reference:
            outcome = f"untested, it keeps the tokens of {parent}"
            if hypothesis.expect == "same":
                outcome = f"confirmed, it keeps the tokens of {parent}"
        else:
            gap = history.compare(measured, reference)
            verdict = _judge(gap, hypothesis.expect, history.resolution)
            outcome = f"{self._format_difference(gap)}: {verdict}"
        text = hypothesis.text or "no hypothesis"
        return f"{trial.name} ({purpose}): {text} => {outcome}"

    def _describe_failures(self) -> Iterator[str]:
        """The most frequent reasons for which candidates could not be measured."""
        reasons = Counter[str]()
        for trial in self.history.trials:
            if trial.result.failed:
                reasons.update(trial.proposal.problems or [trial.result.reason])
        if reasons:
            yield "Proposals that were not valid:"
        for reason, count in reasons.most_common(_MAX_FAILURES):
            yield f"- {reason[:160]} ({count} times)"

    def _format_difference(self, gap: Difference) -> str:
        """A difference with its standard error and the verdict."""
        error = f"{1000 * gap.error:.0f}" if np.isfinite(gap.error) else "unknown"
        verdict = gap.verdict(self.history.resolution)
        return f"{format_score(gap.value)} ± {error}, {verdict}"


def _judge(gap: Difference, expect: Expectation, resolution: float) -> str:
    """Word for whether a difference confirms or refutes an expectation, or leaves it open."""
    verdict = gap.verdict(resolution)
    if verdict == "undecided":
        return "undecided"
    if expect == _OUTCOMES[verdict]:
        return "confirmed"
    return "untested, no answer changed" if gap.value == gap.error == 0 else "refuted"


def _is_idle(state: PruningState) -> bool:
    """Whether only the reassembly of a state acts: it has no exchange, order by quality or core."""
    exchanges = bool(state.constraints.selector.bounds(2)[0])
    return not (exchanges or state.orders_by_quality or state.core is not None)


def _describe_change(change: Change, old: JsonValue, new: JsonValue) -> str:
    """Text of a change, with names of atoms in place of their positions."""
    names = list[str]()
    document = new if change.kind == "added" else old
    for part in change.where.split("/")[1:]:
        if isinstance(document, list):
            document = document[int(part)]
            names.append(
                str(document.get("atom", part)) if isinstance(document, dict) else part
            )
        elif isinstance(document, dict):
            document = document.get(part)
            names.append(part)
    name = " ".join(names[1:] if len(names) > 2 else names)
    if change.kind == "added":
        return f"{name} added: {_format_value(_shorten(change.after))}"
    if change.kind != "changed":
        return f"{name} {change.kind}"
    if isinstance(change.before, dict | list) or isinstance(change.after, dict | list):
        return f"{name} = {_dump(_shorten(change.after))}"
    return f"{name} {_format_value(change.before)} -> {_format_value(change.after)}"


def _format_value(value: JsonValue) -> str:
    """A JSON value as text, with numbers as short as possible."""
    return f"{value:g}" if isinstance(value, float) else _dump(value)


def _shorten(value: JsonValue) -> JsonValue:
    """A call of an atom without its defaults; any other value is returned unchanged."""
    if not isinstance(value, dict) or value.get("atom") not in ATOMS.names():
        return value
    call = ATOMS[str(value["atom"])].call.model_validate(value)
    shortened: JsonValue = call.model_dump(mode="json", exclude_defaults=True)
    return shortened


def _dump(document: JsonValue) -> str:
    return json.dumps(document, separators=(",", ":"))
