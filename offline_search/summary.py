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
from offline_search.differences import SMALLEST_CHANGE, PairedDifference, Verdict
from offline_search.history import CategoryMean, History, Trial
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
    "Candidates: score, on how many questions (differences to {leader}, which leads, and to its "
    "parent, over the questions that both were asked, with the number of those where it is up and "
    "down by more than {smallest}; by category the mean of its answers, and where it was not asked "
    "all questions of it, on how many, and the mean of base on the same{exchanges}); policy."
)
_EXCHANGES = (
    "; tokens that it exchanges; and, as means over images, quality of the lowest pick of the base "
    "policy and of the best other token, both before the exchange"
)
_TITLE_OF_BEST = (
    "Best candidates, of those that were asked all questions of their round: one of each structure "
    "(the names of all atoms):"
)

_TITLE_OF_DROPPED = "Dropped in earlier rounds; the same policy is not measured again:"

_OUTCOMES: Mapping[Verdict, Expectation] = {
    "better": "higher",
    "worse": "lower",
    "same": "same",
}
"""The expectation that a verdict confirms, which is also the word that prompts have for it."""


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
        names = parents | {trial.name for trial in self.latest}
        same_as = {
            trial.result.same_as
            for trial in history.trials
            if trial.result.status == "same" and trial.name in names
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
            _TITLE_OF_DROPPED: dropped,
        }
        printed = set[str]()
        sections: dict[str, Sequence[Trial]] = {}
        for title, trials in by_title.items():
            sections[title] = [
                trial
                for trial in trials
                if trial.state is not None and trial.name not in printed
            ]
            if title == _TITLE_OF_DROPPED:
                sections[title] = sections[title][-_MAX_DROPPED:]
            printed |= {trial.name for trial in sections[title]}
        return sections

    @cached_property
    def printed(self) -> Mapping[str, Trial]:
        """The candidates that are printed, and the base policy, by name."""
        trials = chain([self.history.base], *self.sections.values())
        return {trial.name: trial for trial in trials}

    @cached_property
    def named(self) -> Mapping[str, Trial]:
        """The measured parents of printed candidates that are not printed themselves, by name."""
        history = self.history
        trials: dict[str, Trial] = {}
        for child in self.printed.values():
            for name in child.proposal.parents[:1]:
                parent = history.find(name)
                measured = history.find_measured(name)
                if parent and measured and measured.values is not None:
                    trials |= {trial.name: trial for trial in (parent, measured)}
        return {name: trials[name] for name in trials if name not in self.printed}

    def lines(self) -> Iterator[str]:
        """The summary, line by line."""
        history = self.history
        count = history.count_questions(history.base)
        yield f"Questions asked so far: {count}.{self._describe_resolution()}"
        yield f"Base policy alone ({BASE_PARENT}): {format_score(history.estimate(history.base))}."
        yield from self._describe_categories()
        yield from self._describe_trend()
        if any(self.sections.values()):
            probed = any(trial.exchanges is not None for trial in self.printed.values())
            yield _CANDIDATES.format(
                leader=self.leader.name,
                smallest=f"{1000 * SMALLEST_CHANGE:.0f}",
                exchanges=_EXCHANGES if probed else "",
            )
        for title, trials in self.sections.items():
            if trials:
                yield title
            for trial in trials:
                yield f"- {self._describe(trial)}"
        if self.named:
            yield "Parents of these, whose policies are not printed again:"
        for trial in self.named.values():
            yield f"- {self._describe_score(trial)}"
        yield from self._describe_ties()
        yield from self._describe_hypotheses()
        yield from self._describe_failures()

    def _describe_resolution(self) -> str:
        """Sentence on the differences that count as the same; empty before any is known."""
        history = self.history
        if history.resolution:
            return (
                f" Resolution: {1000 * history.resolution:.0f}; a difference within it is neither "
                "higher nor lower."
            )
        reach = 1000 * history.usual_reach()
        if round(reach) <= 0:
            return ""
        return f" Resolution: {reach:.0f}, two standard errors of a usual difference of leaders."

    def _describe_categories(self) -> Iterator[str]:
        """A row for each category, with the question in it that the leader answers worst."""
        history = self.history
        if not history.examples:
            return
        leader = self.leader
        counts = history.count_categories()
        base = history.by_category(history.base)
        scores = history.by_category(leader)
        losses = {name: counts[name] * mean.value for name, mean in scores.items()}
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
                figures.append(_format_mean(scores.get(name), counts[name]))
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
        text = self._describe_score(trial)
        if trial.values is not None:
            text += f" ({'; '.join(self._list_figures(trial))})"
        return f"{text}; {self._describe_policy(trial)}"

    def _describe_score(self, trial: Trial) -> str:
        """Name and score of a candidate, on how many questions, and why it was dropped."""
        status = trial.result.status
        if status == "same":
            score = format_score(self.history.objective_of(trial.name))
            twin = f"of {trial.result.same_as}, whose tokens and rows it has"
            return f"{trial.name}: {score} {twin}"
        if trial.values is None:
            return f"{trial.name}: not measured, {trial.result.reason[:100]}"
        count = self.history.count_questions(trial)
        score = f"{format_score(self.history.estimate(trial))} on {count} questions"
        if status == "dropped":
            score += f", then dropped: {trial.result.reason}"
        return f"{trial.name}: {score}"

    def _list_figures(self, trial: Trial) -> Iterator[str]:
        """Differences, scores by category, exchanges and idle parts of a measured candidate."""
        history = self.history
        if history.examples:
            for name in self._list_references(trial):
                reference = history.find_measured(name)
                assert reference is not None, "what is referred to was measured"
                gap = history.compare_paired(trial, reference)
                yield f"to {name} {self._format_difference(gap)}"
        yield from self._list_categories(trial)
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
            if not state.reads_quality:
                yield "signals and fusion act on nothing: neither pool nor selector reads quality"
        if state.reassembly.idle:
            yield "reassembly changes no row"

    def _list_references(self, trial: Trial) -> Iterator[str]:
        """Names of the leader, and of a measured parent, unless they are the candidate itself."""
        if trial is not self.leader:
            yield self.leader.name
        name = (*trial.proposal.parents[:1], BASE_PARENT)[0]
        parent = self.history.find_measured(name)
        if parent is None or parent is trial or parent is self.leader:
            return
        if name in self.printed or name in self.named:
            yield name

    def _list_categories(self, trial: Trial) -> Iterator[str]:
        """Mean of each category that a candidate was asked, and those that it was not."""
        means = self.history.by_category(trial)
        counts = self.history.count_categories()
        for name, mean in means.items():
            text = f"{name} {_format_mean(mean, counts[name])}"
            if mean.questions < counts[name]:
                text += f" (base {format_score(mean.base)})"
            yield text
        missing = [name for name in counts if name not in means]
        if missing:
            yield f"not asked: {', '.join(missing)}"

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
            gap = history.compare_paired(measured, reference)
            outcome = self._format_difference(gap)
            if gap.questions:
                outcome += _judge(gap, history.judge(gap.mean), hypothesis.expect)
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

    def _format_difference(self, gap: PairedDifference) -> str:
        """A difference with its standard error, its number of questions, and the verdict."""
        if not gap.questions:
            return "unknown, as no question was asked of both"
        error = (
            f"{1000 * gap.mean.error:.0f}" if np.isfinite(gap.mean.error) else "unknown"
        )
        verdict = self.history.judge(gap.mean)
        return (
            f"{format_score(gap.mean.value)} ± {error}, {_OUTCOMES.get(verdict, verdict)} "
            f"(of {gap.questions}, {gap.rises} up, {gap.falls} down)"
        )


def _judge(gap: PairedDifference, verdict: Verdict, expect: Expectation) -> str:
    """Whether a difference confirms or refutes what was expected; empty where it is undecided."""
    if verdict == "undecided":
        return ""
    if expect == _OUTCOMES[verdict]:
        return ": confirmed"
    is_unchanged = gap.mean.value == gap.mean.error == 0
    return ": untested, no answer changed" if is_unchanged else ": refuted"


def _format_mean(mean: CategoryMean | None, questions: int) -> str:
    """The mean of a category of so many questions, and how many of them were asked if not all."""
    if mean is None:
        return "not asked"
    scope = (
        "" if mean.questions == questions else f" on {mean.questions} of {questions}"
    )
    return f"{format_score(mean.value)}{scope}"


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
