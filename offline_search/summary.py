"""Summary H_t of Algorithm 2: the measurements of all rounds so far, as prompts present them.

Scores, differences and verdicts are explained once, in :mod:`offline_search.task`. A summary has at
most :data:`MAX_SUMMARY` characters. It prints candidates in order of how much they tell, each once,
as changes of its parent if that is printed already, until there is no room for more.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from textwrap import shorten
from typing import Literal

import numpy as np
from pydantic import JsonValue

from offline_search.candidates import BASE_PARENT, Expectation
from offline_search.components import (
    BASE,
    JsonObject,
    compact_json,
    components_json,
    leave_out_kernel,
)
from offline_search.differences import (
    MINIMUM_IMAGES,
    SMALLEST_CHANGE,
    PairedDifference,
    Verdict,
)
from offline_search.history import History, Trial
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.transfer import Change, list_changes

MAX_SUMMARY = 20_000
"""Largest number of characters of a summary."""

_MAX_HYPOTHESES = 5000
"""Largest number of characters of all hypotheses."""

_MAX_STEP = 120
"""Number of characters of the changes of a parent that are printed with a hypothesis."""

_ROOM_OF_COUNT = 50
"""Room for the number of hypotheses that are not listed."""

_MAX_BEST = 10
"""Number of best candidates, of different structures, that a summary lists."""

_MAX_ROUNDS = 10
"""Number of last rounds whose scores a summary lists."""

_MAX_CATEGORIES = 12
"""Number of categories with the largest shares of the loss, which a summary lists."""

_MAX_QUESTION = 160
"""Number of characters of an example question."""

_MAX_FAILURES = 3

_MAX_REASON = 160
"""Number of characters of the reason of a failure."""

_CANDIDATES = (
    "Candidates: score, on how many questions{dropped}; differences to {references}; by category "
    "the mean of its answers less that of base on the same questions, where it was asked {minimum} "
    "or more{exchanges}; policy."
)
_EXCHANGES = (
    "; tokens that it exchanges; means over images of the lowest quality of a reference token and "
    "of the highest of another, before the exchange"
)
_BEST = "The best of each structure, of candidates that were asked all questions of their round:"
_LATEST = "Others of the last round:"
_NAMED = "Others that these name:"
_EARLIER = "Others of earlier rounds:"

_HYPOTHESES = (
    "Hypotheses: the parent, if it is listed; the verdict that was expected; of earlier rounds "
    "what changed in the parent, if that is short; the difference to the parent that tests it:"
)

_Test = Literal["confirmed", "refuted", "undecided"]
"""Verdict on a hypothesis."""

_OUTCOMES: Mapping[Verdict, Expectation] = {
    "better": "higher",
    "worse": "lower",
    "same": "same",
}
"""The expectation that a verdict confirms, which is also the word that prompts have for it."""


def summarize(history: History) -> str:
    """The summary H_t: loss by category, trend, candidates, hypotheses, failures."""
    return _Summary(history).render()


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What was measured of a hypothesis, in words, and the verdict on it."""

    text: str
    verdict: _Test = "undecided"


@dataclass(frozen=True)
class _Summary:
    """The parts of the summary of one history."""

    history: History

    @cached_property
    def leader(self) -> Trial:
        """The best candidate, or the base policy."""
        return self.history.leader()

    @cached_property
    def decimals(self) -> int:
        """Decimals of all scores and differences."""
        return self.history.count_decimals()

    @cached_property
    def resolution(self) -> float:
        """The difference within which verdicts are the same."""
        return self.history.usual_resolution()

    @cached_property
    def latest(self) -> Sequence[Trial]:
        """The candidates of the last round."""
        trials = self.history.trials
        last = max((trial.proposal.round for trial in trials), default=0)
        return [trial for trial in trials if trial.proposal.round == last]

    @cached_property
    def categories(self) -> Sequence[str]:
        """Names of the categories that are listed, the largest loss first."""
        losses = self._losses
        return sorted(losses, key=lambda name: losses[name])[:_MAX_CATEGORIES]

    @cached_property
    def _losses(self) -> Mapping[str, float]:
        """Sum of the leader's values by category, which is negative for a loss."""
        history = self.history
        means = history.by_category(self.leader)
        return {
            name: count * means[name].estimate if name in means else 0.0
            for name, count in history.count_categories().items()
        }

    def render(self) -> str:
        """The text; candidates have the room that all other parts leave."""
        head = [*self._describe_questions(), *self._describe_trend()]
        ties = [*self._describe_ties()]
        failures = [*self._describe_failures()]
        # As if all candidates were printed, which is the longest list of hypotheses.
        names = [BASE_PARENT, *(trial.name for trial in self.history.trials)]
        longest = self._describe_hypotheses(names, _MAX_HYPOTHESES)
        room = sum(len(line) + 1 for line in longest) + _ROOM_OF_COUNT
        used = sum(len(line) + 1 for line in (*head, *ties, *failures)) + room
        printed = {self.history.base.name: self.history.base}
        candidates = [*self._list_candidates(MAX_SUMMARY - used, printed)]
        hypotheses = [*self._describe_hypotheses(printed, room)]
        return "\n".join([*head, *candidates, *ties, *hypotheses, *failures])

    def _describe_questions(self) -> Iterator[str]:
        """Number of questions, resolution, the base policy's score, and the categories."""
        history = self.history
        resolution = ""
        if self.resolution:
            resolution = f" Resolution: {self.resolution:.{self.decimals}f}."
        errors = [
            history.compare_paired(trial, history.base).mean.error
            for trial in history.evaluated()
        ]
        if known := [error for error in errors if 0 < error < np.inf]:
            resolution += (
                f" Median standard error of the differences to {BASE_PARENT}: "
                f"{median(known):.{self.decimals}f}."
            )
        count = history.count_questions(history.base)
        yield f"Questions asked so far, all of them of base: {count}.{resolution}"
        score = self._format_score(history.estimate(history.base))
        yield f"Base policy alone ({BASE_PARENT}): {score}."
        if history.examples:
            yield from self._describe_categories()

    def _describe_categories(self) -> Iterator[str]:
        """A row for each category, with the question in it that the leader answers worst."""
        history = self.history
        leader = self.leader
        columns = "score of base"
        if leader is not history.base:
            columns += f", score of {leader.name}"
        yield (
            f"Category: questions, {columns}, share of the loss of {leader.name}; the question "
            "that it loses most at, and its score there, or an example where it loses at none:"
        )
        counts = history.count_categories()
        base = history.by_category(history.base)
        means = history.by_category(leader)
        total = sum(self._losses.values())
        for name in self.categories:
            figures = [str(counts[name]), self._format_score(base[name].estimate)]
            if leader is not history.base:
                mean = means.get(name)
                figures.append(
                    self._format_score(mean.estimate) if mean else "not asked"
                )
            share = self._losses[name] / total if total else 0.0
            figures.append(f"{round(100 * share)}%")
            yield f"- {name}: {', '.join(figures)}; {self._find_question(name)}"
        others = [name for name in counts if name not in self.categories]
        if others:
            share = sum(self._losses[name] for name in others) / total if total else 0.0
            questions = sum(counts[name] for name in others)
            yield f"- {len(others)} others: {questions} questions, {round(100 * share)}%"

    def _find_question(self, category: str) -> str:
        """The question that the leader loses most at, with its value; or an example."""
        history = self.history
        rows = [
            row
            for row, example in enumerate(history.examples)
            if example.category == category
        ]
        values = history.best_values()
        asked = [row for row in rows if np.isfinite(history.base_values[row])]
        worst = min(asked, key=lambda row: np.nan_to_num(values[row]))
        text = history.examples[worst].question
        if len(text) > _MAX_QUESTION:
            text = f"{text[:_MAX_QUESTION]}..."
        question = json.dumps(text, ensure_ascii=False)
        if values[worst] < -SMALLEST_CHANGE:
            return f"{question} {self._format_score(values[worst])}"
        return f"such as {question}"

    def _describe_trend(self) -> Iterator[str]:
        """Scores of the candidates of the last rounds, from the second round on."""
        rounds: dict[int, list[float]] = {}
        for trial in self.history.trials:
            score = self.history.estimate(trial)
            if score is not None:
                rounds.setdefault(trial.proposal.round, []).append(score)
        if len(rounds) > 1:
            scores = [
                f"{number}: {self._format_score(max(values))}, "
                f"{self._format_score(median(values))}"
                for number, values in rounds.items()
            ]
            yield (
                "Best and median score of each round's candidates, as estimated now: "
                f"{'; '.join(scores[-_MAX_ROUNDS:])}."
            )

    def _rank_candidates(self) -> Iterator[tuple[str, Trial]]:
        """Candidates with the titles of their sections, in order of how much they tell.

        The leader; what the model proposed last, and what that names; the best of each structure;
        the others of the last round, then those of earlier rounds, by their scores.
        """
        history = self.history
        best = history.ranked_structures()[:_MAX_BEST]
        yield from ((_BEST, trial) for trial in best if trial is self.leader)
        names_of_best = [trial.name for trial in best]
        tested = [trial for trial in self.latest if trial.proposal.hypothesis]
        names = [trial.result.same_as for trial in tested]
        names += [name for trial in tested for name in trial.proposal.parents[:1]]
        for name in names:
            trial = history.find(name)
            if trial is not None and trial is not history.base:
                yield _BEST if trial.name in names_of_best else _NAMED, trial
        yield from (
            (_BEST if trial.name in names_of_best else _LATEST, trial)
            for trial in tested
        )
        yield from ((_BEST, trial) for trial in best)
        scores = {
            trial.name: score
            for trial in history.trials
            if (score := history.estimate(trial)) is not None
        }
        by_score = sorted(
            (trial for trial in history.trials if trial.name in scores),
            key=lambda trial: -scores[trial.name],
        )
        latest = [trial.name for trial in self.latest]
        yield from ((_LATEST, trial) for trial in by_score if trial.name in latest)
        yield from ((_EARLIER, trial) for trial in by_score)

    def _list_candidates(self, room: int, printed: dict[str, Trial]) -> Iterator[str]:
        """Lines of the candidates that fit into so many characters, by section.

        The candidates are added to those ``printed``.
        """
        history = self.history
        header = self._describe_columns()
        counted = "{} more candidates were measured and are not listed."
        room -= sum(map(len, (header, _BEST, _LATEST, _NAMED, _EARLIER, counted))) + 20
        sections: dict[str, list[str]] = {
            title: [] for title in (_BEST, _LATEST, _NAMED, _EARLIER)
        }
        for title, trial in self._rank_candidates():
            if trial.name in printed or trial.state is None:
                continue
            line = f"- {self._describe(trial, printed)}"
            if len(line) < room:
                room -= len(line) + 1
                printed[trial.name] = trial
                sections[title].append(line)
        if len(printed) > 1:
            yield header
        for title, lines in sections.items():
            if lines:
                yield title
                yield from lines
        measured = [trial for trial in history.trials if trial.values is not None]
        unlisted = sum(trial.name not in printed for trial in measured)
        if unlisted:
            yield counted.format(unlisted)

    def _describe_columns(self) -> str:
        """What the line of a candidate has, in order."""
        text = BASE_PARENT
        if self.leader is not self.history.base:
            text = f"{self.leader.name}, which leads, and {BASE_PARENT}"
        trials = self.history.trials
        probed = any(trial.exchanges is not None for trial in trials)
        dropped = any(trial.result.status == "dropped" for trial in trials)
        return _CANDIDATES.format(
            references=text,
            dropped=", why it was dropped if it was" if dropped else "",
            minimum=MINIMUM_IMAGES,
            exchanges=_EXCHANGES if probed else "",
        )

    def _describe(self, trial: Trial, printed: Mapping[str, Trial]) -> str:
        """One candidate on one line: score, differences, what it did, and its policy."""
        figures = [self._describe_score(trial), *self._list_figures(trial)]
        return f"{trial.name}: {'; '.join(figures)}; {self._describe_policy(trial, printed)}"

    def _describe_score(self, trial: Trial) -> str:
        """Score of a candidate, on how many questions, and why it was dropped."""
        result = trial.result
        if result.status == "same":
            score = self._format_score(self.history.objective_of(trial.name))
            return f"{score} of {result.same_as}, whose tokens and rows it has"
        if trial.values is None:
            return f"not measured, {result.reason[:100]}"
        count = self.history.count_questions(trial)
        score = self._format_score(self.history.estimate(trial))
        dropped = f", dropped: {result.reason}" if result.status == "dropped" else ""
        return f"{score} on {count} questions{dropped}"

    def _list_figures(self, trial: Trial) -> Iterator[str]:
        """Differences, categories, exchanges and idle parts of a measured candidate."""
        if trial.values is None:
            return
        history = self.history
        references = {trial.name: trial for trial in (self.leader, history.base)}
        references.pop(trial.name, None)
        for name, reference in references.items():
            gap = history.compare_paired(trial, reference)
            if gap.questions:
                yield f"to {name} {self._format_difference(gap)}"
        means = history.by_category(trial)
        gains = [
            f"{name} {self._format_score(means[name].value - means[name].base)}"
            for name in self.categories
            if name in means and means[name].questions >= MINIMUM_IMAGES
        ]
        if gains:
            yield ", ".join(gains)
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

    def _describe_policy(self, trial: Trial, printed: Mapping[str, Trial]) -> str:
        """The candidate as changes of a parent that is printed, or as a whole."""
        state = trial.require_state()
        names_bases = self.history.names_bases
        if _is_idle(state):
            acting = compact_json(state, names_bases)
            acting.pop("scoring", None)
            acting.pop("constraints", None)
            return f"exchanges nothing, with {_dump(acting)}"
        texts = [_dump(compact_json(state, names_bases))]
        for name in (*trial.proposal.parents[:1], self.leader.name):
            near = printed.get(name)
            # Changes of a scoring that is not printed would not be understood.
            if near is not None and near.state and not _is_idle(near.state):
                texts.append(f"{name} with {self._list_changes(near.state, state)}")
        return min(texts, key=len)

    def _list_changes(self, parent: PruningState, state: PruningState) -> str:
        """Changes that make one state of another."""
        old = _describe_state(parent, self.history.names_bases)
        new = _describe_state(state, self.history.names_bases)
        changes = list_changes(old, new)
        texts = [_describe_change(change, old) for change in changes]
        return ", ".join(texts) or "no change"

    def _describe_ties(self) -> Iterator[str]:
        """The candidates that may score as high as the leader."""
        tied = self.history.tied() if self.history.resolution else []
        if tied:
            names = ", ".join(trial.name for trial in tied[:_MAX_BEST])
            yield (
                f"Of the best of each structure, these are *same* or *undecided* to "
                f"{self.leader.name} by their scores, for all questions: {names}."
            )

    def _describe_hypotheses(
        self, printed: Collection[str], room: int
    ) -> Iterator[str]:
        """One line for each hypothesis that there is room for.

        Those of the last round come first, then decided ones of earlier rounds, the latest first.
        One of an earlier round is left out if nothing says what it changed: its candidate is not
        among those ``printed``, and its change is long.
        """
        tested = [trial for trial in self.history.trials if trial.proposal.hypothesis]
        if not tested:
            return
        yield _HYPOTHESES
        latest = [trial.name for trial in self.latest]
        outcomes = {trial.name: self._test_hypothesis(trial) for trial in tested}
        tested.sort(key=lambda trial: -trial.proposal.round)
        tested.sort(
            key=lambda trial: (
                trial.name not in latest,
                trial.name not in latest
                and outcomes[trial.name].verdict == "undecided",
            )
        )
        room -= len(_HYPOTHESES) + _ROOM_OF_COUNT
        listed = 0
        for trial in tested:
            is_latest = trial.name in latest
            change = "" if is_latest else self._describe_step(trial, printed)
            if not (is_latest or change or trial.name in printed):
                continue
            described = _describe_hypothesis(trial, is_latest, change, printed)
            line = f"- {described} => {outcomes[trial.name].text}"
            room -= len(line) + 1
            if room < 0:
                break
            listed += 1
            yield line
        if listed < len(tested):
            yield f"{len(tested) - listed} more hypotheses are not listed."

    def _describe_step(self, trial: Trial, printed: Collection[str]) -> str:
        """What a candidate changed of its parent, if that is short; else empty.

        Of a duplicate it is the name of the candidate that was measured, if that is ``printed``.
        """
        measured = trial.result.same_as
        if measured in printed:
            return f"tokens and rows of {measured}"
        parent = self.history.find((*trial.proposal.parents[:1], BASE_PARENT)[0])
        if parent is None or parent.state is None or trial.state is None:
            return ""
        changes = self._list_changes(parent.state, trial.state)
        return changes if len(changes) <= _MAX_STEP else ""

    def _test_hypothesis(self, trial: Trial) -> _Outcome:
        """What was measured of a hypothesis, and the verdict on it."""
        history = self.history
        hypothesis = trial.proposal.hypothesis
        assert hypothesis is not None
        parent = (*trial.proposal.parents[:1], BASE_PARENT)[0]
        measured = history.find_measured(trial.name)
        reference = history.find_measured(parent)
        if measured is None or history.estimate(measured) is None:
            result = trial.result
            return _Outcome(f"not measured, {result.status}: {result.reason[:100]}")
        if reference is None or reference.values is None:
            return _Outcome("untested, the parent was not measured")
        if measured is reference:
            kept = f"it keeps the tokens of {parent}"
            if hypothesis.expect == "same":
                return _Outcome(f"confirmed, {kept}", "confirmed")
            return _Outcome(f"untested, {kept}")
        gap = history.compare_paired(measured, reference)
        text = self._format_difference(gap)
        if not gap.questions:
            return _Outcome(text)
        if gap.mean.value == gap.mean.error == 0 and hypothesis.expect != "same":
            return _Outcome(f"{text}: untested, no answer changed")
        found = gap.mean.judge(self.resolution)
        if found == "undecided":
            return _Outcome(text)
        verdict: _Test = (
            "confirmed" if hypothesis.expect == _OUTCOMES[found] else "refuted"
        )
        return _Outcome(f"{text}: {verdict}", verdict)

    def _describe_failures(self) -> Iterator[str]:
        """The most frequent reasons for which candidates could not be measured."""
        reasons = Counter[str]()
        for trial in self.history.trials:
            if trial.result.failed:
                reasons.update(trial.proposal.problems or [trial.result.reason])
        if reasons:
            yield "Proposals that were not valid:"
        for reason, count in reasons.most_common(_MAX_FAILURES):
            text = shorten(reason, _MAX_REASON, placeholder=" ...")
            yield f"- {text} ({count} times)"

    def _format_score(self, score: float | None) -> str:
        """A score with the decimals that the errors of differences support."""
        return "not measured" if score is None else f"{score:+.{self.decimals}f}"

    def _format_difference(self, gap: PairedDifference) -> str:
        """A difference with its standard error, the verdict, and its numbers of questions."""
        if not gap.questions:
            return "unknown, as no question was asked of both"
        error = "unknown"
        if np.isfinite(gap.mean.error):
            error = f"{gap.mean.error:.{self.decimals}f}"
        verdict = gap.mean.judge(self.resolution)
        return (
            f"{self._format_score(gap.mean.value)} ± {error}, {_OUTCOMES.get(verdict, verdict)} "
            f"(of {gap.questions}, {gap.rises} up, {gap.falls} down)"
        )


def _describe_hypothesis(
    trial: Trial, is_latest: bool, change: str, printed: Collection[str]
) -> str:
    """Name, parent, expectation and change of a candidate, and its hypothesis.

    ``is_latest``: whether to add the purpose. A parent of earlier candidates has to be ``printed``.
    """
    hypothesis = trial.proposal.hypothesis
    assert hypothesis is not None
    parent = (*trial.proposal.parents[:1], BASE_PARENT)[0]
    details = f"expected {hypothesis.expect}"
    if is_latest:
        details = f"{hypothesis.purpose or 'no purpose'} of {parent}, {details}"
    elif parent in printed:
        details = f"of {parent}, {details}"
    if change:
        details += f"; {change}"
    return f"{trial.name} ({details}): {hypothesis.text or 'no hypothesis'}"


def _describe_state(state: PruningState, names_bases: bool) -> JsonObject:
    """The components of a state that act, to be compared with those of another."""
    body = components_json(state)
    leave_out_kernel(body, state)
    return {**body, BASE: {"name": state.base_policy.name}} if names_bases else body


def _is_idle(state: PruningState) -> bool:
    """Whether only the reassembly of a state acts: it has no exchange, order by quality or core."""
    exchanges = bool(state.constraints.selector.bounds(2)[0])
    return not (exchanges or state.orders_by_quality or state.core is not None)


def _describe_change(change: Change, old: JsonValue) -> str:
    """Text of a change of ``old``, with names of atoms in place of their positions."""
    names = list[str]()
    document = old
    parts = change.where.split("/")[1:]
    for depth, part in enumerate(parts, 1):
        if change.kind == "added" and depth == len(parts):
            document = change.after  # the last position is that in the new document
        elif isinstance(document, list):
            document = document[int(part)]
        elif isinstance(document, dict):
            document = document.get(part)
        if part.isdecimal() and isinstance(document, dict):
            part = str(document.get("atom", part))
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
