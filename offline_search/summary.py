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

import numpy as np

from offline_search.candidates import BASE_PARENT
from offline_search.components import compact_json, describe_changes, dump_json
from offline_search.differences import MINIMUM_IMAGES, SMALLEST_CHANGE
from offline_search.history import CategoryMean, History, Trial
from offline_search.hypotheses import ROOM_OF_COUNT, Hypotheses
from offline_search.ledger import Exchange
from vllm_autoprune.tpdsl.state import PruningState

MAX_SUMMARY = 20_000
"""Largest number of characters of a summary."""

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

_MAX_FIRST = 3
"""Number of best candidates, of different structures, that are printed before all others."""

_CANDIDATES = (
    "Candidates: score, on how many questions{dropped}; differences to {references}; "
    "{of_each}by category the mean of its answers less that of base on the same questions, of the "
    "categories above with {minimum} of them or more and of all others together, and their number "
    "where that is a part{exchanges}; policy, whole or as changes of another."
)
_EXCHANGES = (
    "; means over a few images{of_models} of the number of tokens that it exchanges, and of the "
    "lowest quality of a reference token and the highest of another, before the exchange"
)
_BEST = (
    f"The best of each structure, of the best {_MAX_BEST} at most, of candidates that were asked "
    "all questions of their round:"
)
_LATEST = "More of the last round:"
_NAMED = "Others that these name, of any round:"
_EARLIER = "More of earlier rounds:"

_UNLISTED = (
    "Not listed: {} that were measured, {} of them in the last round, and {} with tokens and rows "
    "of measured ones."
)


def summarize(history: History) -> str:
    """The summary H_t: loss by category, trend, candidates, hypotheses, failures."""
    return _Summary(history).render()


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
    def _has_models(self) -> bool:
        """Whether a search has several models."""
        return any(example.model for example in self.history.examples)

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
        tests = Hypotheses(self.history, self.decimals, self.resolution)
        room = MAX_SUMMARY - _count_characters([*head, *ties, *failures])
        # As if all candidates were printed, which is the longest list of hypotheses.
        names = [BASE_PARENT, *(trial.name for trial in self.history.trials)]
        hypotheses = [*tests.describe(names, room)]
        candidates: list[str] = []
        # The second time, candidates have the room of the hypotheses that were left out.
        for _ in range(2):
            printed = {self.history.base.name: self.history.base}
            reserved = _count_characters(hypotheses) + ROOM_OF_COUNT
            candidates = [*self._list_candidates(room - reserved, printed)]
            free = room - _count_characters(candidates)
            hypotheses = [*tests.describe(printed, free)]
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
                f" Median standard error of the differences to {BASE_PARENT} of candidates that "
                f"were asked all questions of their round: {median(known):.{self.decimals}f}."
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
            f"Category: questions, {columns}, share of the loss of {leader.name}; of the questions "
            "that it was asked the one that it loses most at, and its score there, or an example "
            "where it loses at none:"
        )
        counts = history.count_categories()
        base = history.by_category(history.base)
        means = history.by_category(leader)
        total = sum(min(loss, 0.0) for loss in self._losses.values())
        for name in self.categories:
            figures = [str(counts[name]), self._format_score(base[name].estimate)]
            if leader is not history.base:
                mean = means.get(name)
                figures.append(
                    self._format_score(mean.estimate) if mean else "not asked"
                )
            share = min(self._losses[name], 0.0) / total if total else 0.0
            figures.append(f"{round(100 * share)}%")
            yield f"- {name}: {', '.join(figures)}; {self._find_question(name)}"
        others = [name for name in counts if name not in self.categories]
        if others:
            lost = sum(min(self._losses[name], 0.0) for name in others)
            share = lost / total if total else 0.0
            questions = sum(counts[name] for name in others)
            yield f"- {len(others)} others: {questions} questions, {round(100 * share)}%"

    def _find_question(self, category: str) -> str:
        """The question that the leader loses most at, with its value; or an example."""
        history = self.history
        rows = [
            row
            for row, example in enumerate(history.examples)
            if example.stratum == category
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
        best: dict[int, float] = {}
        for trial in self.history.trials:
            score = self.history.estimate(trial)
            if score is None:
                continue
            number = trial.proposal.round
            rounds.setdefault(number, []).append(score)
            if trial.result.status == "evaluated":
                best[number] = max(score, best.get(number, score))
        if len(rounds) > 1:
            scores = [
                f"{number}: {self._format_score(best[number]) if number in best else 'none'}, "
                f"{self._format_score(median(values))}"
                for number, values in rounds.items()
            ]
            yield (
                "Best score of the candidates that each round asked all its questions, and median "
                "score of all that it measured, of rounds that measured any, as estimated now: "
                f"{'; '.join(scores[-_MAX_ROUNDS:])}."
            )

    def _rank_candidates(self) -> Iterator[tuple[str, Trial]]:
        """Candidates with the titles of their sections, in order of how much they tell.

        The best of a few structures; what the model proposed last, and what that names; the best of
        each structure; the others of the last round, then those of earlier rounds, by their scores.
        """
        history = self.history
        best = history.ranked_structures()[:_MAX_BEST]
        yield from ((_BEST, trial) for trial in best[:_MAX_FIRST])
        names_of_best = [trial.name for trial in best]
        latest = history.latest()
        tested = [trial for trial in latest if trial.proposal.hypothesis]
        names = [trial.result.same_as for trial in tested]
        names += [name for trial in tested for name in trial.proposal.parents[:1]]
        parents = [history.find_measured(name) for name in names]
        measured = [trial for trial in (*parents, *tested) if trial is not None]
        names += [trial.name for trial in parents if trial is not None]
        names += [trial.result.rival for trial in measured]
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
        names_of_latest = [trial.name for trial in latest]
        for trial in by_score:
            if trial.name in names_of_latest:
                yield from self._rank_rival(trial, names_of_latest)
                yield _LATEST, trial
        for trial in by_score:
            yield from self._rank_rival(trial, names_of_latest)
            yield _EARLIER, trial

    def _rank_rival(
        self, trial: Trial, latest: Collection[str]
    ) -> Iterator[tuple[str, Trial]]:
        """The candidate for which ``trial`` was dropped, which its line names."""
        rival = self.history.find(trial.result.rival)
        if rival is not None and rival is not self.history.base:
            yield _LATEST if rival.name in latest else _EARLIER, rival

    def _list_candidates(self, room: int, printed: dict[str, Trial]) -> Iterator[str]:
        """Lines of the candidates that fit into so many characters, by section.

        The candidates are added to those ``printed``.
        """
        history = self.history
        header = self._describe_columns()
        texts = (header, _BEST, _LATEST, _NAMED, _EARLIER, _UNLISTED)
        room -= sum(map(len, texts)) + 20
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
        unlisted = [trial for trial in history.trials if trial.name not in printed]
        measured = [trial for trial in unlisted if trial.values is not None]
        latest = sum(trial in history.latest() for trial in measured)
        repeated = sum(trial.result.status == "same" for trial in unlisted)
        if measured or repeated:
            yield _UNLISTED.format(len(measured), latest, repeated)

    def _describe_columns(self) -> str:
        """What the line of a candidate has, in order."""
        text = BASE_PARENT
        if self.leader is not self.history.base:
            text = (
                f"{self.leader.name}, which leads, where questions were asked of both, and "
                f"{BASE_PARENT}"
            )
        trials = self.history.trials
        probed = any(trial.exchanges for trial in trials)
        dropped = any(trial.result.status == "dropped" for trial in trials)
        of_models = " of each model" if self._has_models else ""
        return _CANDIDATES.format(
            references=text,
            dropped=", why it was dropped if it was" if dropped else "",
            of_each="by model and " if self._has_models else "",
            minimum=MINIMUM_IMAGES,
            exchanges=_EXCHANGES.format(of_models=of_models) if probed else "",
        )

    def _describe(self, trial: Trial, printed: Mapping[str, Trial]) -> str:
        """One candidate on one line: score, differences, what it did, and its policy."""
        figures = [self._describe_score(trial, printed), *self._list_figures(trial)]
        return f"{trial.name}: {'; '.join(figures)}; {self._describe_policy(trial, printed)}"

    def _describe_score(self, trial: Trial, printed: Collection[str]) -> str:
        """Score of a candidate, on how many questions, and why it was dropped.

        Of the rival for which it was dropped, the name is told if it is ``printed``.
        """
        result = trial.result
        if result.status == "same":
            score = self._format_score(self.history.objective_of(trial.name))
            return f"{score} of {result.same_as}, whose tokens and rows it has"
        if trial.values is None:
            return f"not measured, {result.reason[:100]}"
        count = self.history.count_questions(trial)
        score = self._format_score(self.history.estimate(trial))
        if result.status != "dropped":
            return f"{score} on {count} questions"
        reason = result.reason
        if result.rival and result.rival not in printed:
            reason = reason.replace(f" {result.rival}", " another", 1)
        return f"{score} on {count} questions, dropped: {reason}"

    def _list_figures(self, trial: Trial) -> Iterator[str]:
        """Differences, gains, exchanges and idle parts of a measured candidate."""
        if trial.values is None:
            return
        history = self.history
        references = {trial.name: trial for trial in (self.leader, history.base)}
        references.pop(trial.name, None)
        for name, reference in references.items():
            gap = history.compare_paired(trial, reference)
            if gap.questions:
                yield f"to {name} {gap.describe(self.decimals, self.resolution)}"
        yield from self._list_gains(trial)
        state = trial.require_state()
        yield from _describe_exchanges(trial.exchanges, state)
        if not _is_idle(state):
            yield from (
                f"{call.atom} has weight 0"
                for call in state.scoring.signals
                if not call.weight
            )
            if not state.reads_quality:
                yield "signals and fusion act on nothing: neither pool nor selector reads quality"
        if state.reassembly.idle:
            sorts = state.reassembly.atom.endswith((".score", ".pick"))
            yield f"reassembly changes {'the order of rows alone' if sorts else 'no row'}"

    def _list_gains(self, trial: Trial) -> Iterator[str]:
        """Gains over the base policy by model, if there are several, then by category."""
        history = self.history
        means = history.by_category(trial)
        counts = history.count_categories()
        of_models = [
            f"{name} {self._format_score(gain)}"
            for name, gain in history.gains_by_model(trial).items()
        ]
        of_categories: list[str] = []
        for name in self.categories:
            if name in means and means[name].questions >= MINIMUM_IMAGES:
                mean = means[name]
                gain = self._format_score(mean.value - mean.base)
                is_part = mean.questions < counts[name]
                count = f" (of {mean.questions})" if is_part else ""
                of_categories.append(f"{name} {gain}{count}")
        of_categories += self._list_rest(means)
        for gains in (of_models, of_categories):
            if gains:
                yield ", ".join(gains)

    def _list_rest(self, means: Mapping[str, CategoryMean]) -> Iterator[str]:
        """Gains over the base policy in all categories together that have none of their own."""
        rest: dict[str, list[CategoryMean]] = {}
        for name, mean in means.items():
            if name not in self.categories or mean.questions < MINIMUM_IMAGES:
                model, colon, _ = (
                    name.partition(": ") if self._has_models else ("",) * 3
                )
                rest.setdefault(f"{model}{colon}others", []).append(mean)
        for name, parts in rest.items():
            count = sum(mean.questions for mean in parts)
            total = sum(mean.questions * (mean.value - mean.base) for mean in parts)
            yield f"{name} {self._format_score(total / count)} (of {count})"

    def _describe_policy(self, trial: Trial, printed: Mapping[str, Trial]) -> str:
        """The candidate as changes of a parent that is printed, or as a whole."""
        state = trial.require_state()
        names_bases = self.history.names_bases
        if _is_idle(state):
            acting = compact_json(state, names_bases)
            acting.pop("scoring", None)
            acting.pop("constraints", None)
            return f"exchanges nothing, with {dump_json(acting)}"
        twin = printed.get(trial.result.same_as)
        if twin is not None and twin.require_state().digest == state.digest:
            return f"the policy of {twin.name}"
        texts = [dump_json(compact_json(state, names_bases))]
        names = (trial.result.same_as, *trial.proposal.parents[:1], self.leader.name)
        for name in names:
            near = printed.get(name)
            # Changes of a scoring that is not printed would not be understood.
            if near is not None and near.state and not _is_idle(near.state):
                changes = describe_changes(near.state, state, names_bases)
                texts.append(f"{name} with {changes}")
        return min(texts, key=len)

    def _describe_ties(self) -> Iterator[str]:
        """The candidates that may score as high as the leader."""
        history = self.history
        leader = self.leader
        tied: list[str] = []
        for trial in history.ranked_structures() if history.resolution else []:
            gap = history.compare_paired(trial, leader)
            difference = gap.mean
            if not gap.questions:
                difference = history.compare(trial, leader)
            verdict = difference.judge(self.resolution, self.decimals)
            if trial is not leader and verdict in ("same", "undecided"):
                tied.append(trial.name)
        if tied:
            yield (
                f"Of the best of each structure, these are *same* or *undecided* to {leader.name}, "
                "by their scores where no question was asked of both: "
                f"{', '.join(tied[:_MAX_BEST])}."
            )

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
        return "not measured" if score is None else f"{score:+z.{self.decimals}f}"


def _describe_exchanges(
    exchanges: Mapping[str, Exchange], state: PruningState
) -> Iterator[str]:
    """Numbers of tokens that a candidate exchanges, and their qualities, with the model of each.

    An idle candidate has no numbers of tokens; of one that exchanges whatever the quality, none is
    told.
    """
    is_idle = _is_idle(state)
    counts: list[str] = []
    qualities: list[str] = []
    for model, exchange in exchanges.items():
        of_model = f" on {model}" if model else ""
        unit = "" if counts else " tokens"
        counts.append(f"{exchange.tokens:.1f}{unit}{of_model}")
        if exchange.quality is not None:
            lowest, highest = exchange.quality
            qualities.append(f"{lowest:.2f} and {highest:.2f}{of_model}")
    if counts and not is_idle:
        yield f"exchanges {', '.join(counts)}"
    if qualities and (is_idle or state.reads_quality):
        yield f"quality {', '.join(qualities)}"


def _count_characters(lines: Sequence[str]) -> int:
    """Number of characters of lines with their line breaks."""
    return sum(len(line) + 1 for line in lines)


def _is_idle(state: PruningState) -> bool:
    """Whether only the reassembly of a state acts: it has no exchange, order by quality or core."""
    exchanges = bool(state.constraints.selector.bounds(2)[0])
    return not (exchanges or state.orders_by_quality or state.core is not None)
