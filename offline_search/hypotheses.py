"""Hypotheses of candidates: the verdict on each, and their list in the summary H_t."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from offline_search.candidates import BASE_PARENT
from offline_search.components import describe_changes
from offline_search.differences import WORDS
from offline_search.history import History, Trial

_MAX_CHARACTERS = 5000
"""Largest number of characters of all hypotheses."""

_MAX_CHANGES = 120
"""Number of characters of the changes of a parent that are printed with a hypothesis."""

ROOM_OF_COUNT = 50
"""Room for the number of hypotheses that are not listed."""

_TITLE = (
    "Hypotheses: the parent, or the candidate whose tokens and rows the parent has; the verdict "
    "that was expected; of earlier rounds what changed in the parent, if that is short, or the "
    "candidate whose tokens and rows it has; the difference to the parent that tests it:"
)

_Verdict = Literal["confirmed", "refuted", "undecided"]
"""Verdict on a hypothesis."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What was measured of a hypothesis, in words, and the verdict on it."""

    text: str
    verdict: _Verdict = "undecided"


@dataclass(frozen=True)
class Hypotheses:
    """The hypotheses of a history, with their verdicts.

    Differences are printed with so many ``decimals``, and are the same within ``resolution``.
    """

    history: History
    decimals: int
    resolution: float

    @cached_property
    def _latest(self) -> Collection[str]:
        """Names of the candidates of the last round."""
        return [trial.name for trial in self.history.latest()]

    @cached_property
    def _outcomes(self) -> dict[str, _Outcome]:
        """Outcomes by the name of the candidate that tests the hypothesis, in order of listing.

        Those of the last round come first, then decided ones of earlier rounds, the latest first.
        """
        tested = [trial for trial in self.history.trials if trial.proposal.hypothesis]
        outcomes = {trial.name: self._judge(trial) for trial in tested}

        def rank(trial: Trial) -> tuple[bool, bool, int]:
            is_earlier = trial.name not in self._latest
            is_undecided = outcomes[trial.name].verdict == "undecided"
            return is_earlier, is_earlier and is_undecided, -trial.proposal.round

        return {trial.name: outcomes[trial.name] for trial in sorted(tested, key=rank)}

    def describe(self, printed: Collection[str], room: int) -> Iterator[str]:
        """One line for each hypothesis that fits into ``room`` characters, and into 5,000.

        A hypothesis of an earlier round is left out if nothing says what it changed: its parent is
        not among those ``printed`` or, where its change is long, its candidate.
        """
        if not self._outcomes:
            return
        yield _TITLE
        room = min(room, _MAX_CHARACTERS) - len(_TITLE) - ROOM_OF_COUNT
        listed = 0
        for name, outcome in self._outcomes.items():
            trial = self.history.find(name)
            assert trial is not None
            is_latest = name in self._latest
            change = "" if is_latest else self._describe_step(trial, printed)
            parent = self._name_parent(trial, printed)
            if not (is_latest or (parent and (change or name in printed))):
                continue
            described = _describe_hypothesis(trial, is_latest, change, parent)
            line = f"- {described} => {outcome.text}"
            room -= len(line) + 1
            if room < 0:
                break
            listed += 1
            yield line
        if listed < len(self._outcomes):
            yield f"{len(self._outcomes) - listed} more hypotheses are not listed."

    def _name_parent(self, trial: Trial, printed: Collection[str]) -> str:
        """The parent, or the candidate that it duplicates, whichever is printed; else empty."""
        name = _parent_of(trial)
        measured = self.history.find_measured(name)
        names = [name, measured.name if measured is not None else ""]
        return next((name for name in names if name in printed), "")

    def _describe_step(self, trial: Trial, printed: Collection[str]) -> str:
        """What a candidate changed of its parent, if that is short; else empty.

        Of a duplicate it is the name of the candidate that was measured, if that is ``printed``.
        """
        measured = trial.result.same_as
        if measured in printed:
            return f"tokens and rows of {measured}"
        parent = self.history.find(_parent_of(trial))
        if parent is None or parent.state is None or trial.state is None:
            return ""
        bases = self.history.names_bases
        changes = describe_changes(parent.state, trial.state, bases)
        return changes if len(changes) <= _MAX_CHANGES else ""

    def _judge(self, trial: Trial) -> _Outcome:
        """What was measured of a hypothesis, and the verdict on it."""
        history = self.history
        hypothesis = trial.proposal.hypothesis
        assert hypothesis is not None
        measured = history.find_measured(trial.name)
        reference = history.find_measured(_parent_of(trial))
        if measured is None or history.estimate(measured) is None:
            result = trial.result
            return _Outcome(f"not measured, {result.status}: {result.reason[:100]}")
        if reference is None or reference.values is None:
            return _Outcome("the parent was not measured: untested")
        if measured is reference:
            kept = "the tokens and rows of its parent"
            if hypothesis.expect == "same":
                return _Outcome(f"{kept}: confirmed", "confirmed")
            return _Outcome(f"{kept}: untested")
        gap = history.compare_paired(measured, reference)
        text = gap.describe(self.decimals, self.resolution)
        if not gap.questions:
            return _Outcome(f"{text}: untested")
        if gap.mean.value == gap.mean.error == 0 and hypothesis.expect != "same":
            return _Outcome(f"{text}: untested")
        found = gap.mean.judge(self.resolution, self.decimals)
        if found == "undecided":
            return _Outcome(text)
        is_expected = hypothesis.expect == WORDS[found]
        verdict: _Verdict = "confirmed" if is_expected else "refuted"
        return _Outcome(f"{text}: {verdict}", verdict)


def _parent_of(trial: Trial) -> str:
    """Name of the candidate that a hypothesis is about, or of the base policy alone."""
    return (*trial.proposal.parents[:1], BASE_PARENT)[0]


def _describe_hypothesis(
    trial: Trial, is_latest: bool, change: str, parent: str
) -> str:
    """Name, ``parent``, expectation and change of a candidate, and its hypothesis.

    ``is_latest``: whether to add the purpose, and the parent whatever is printed.
    """
    hypothesis = trial.proposal.hypothesis
    assert hypothesis is not None
    details = f"expected {hypothesis.expect}"
    if is_latest:
        purpose = hypothesis.purpose or "no purpose"
        details = f"{purpose} of {parent or _parent_of(trial)}, {details}"
    elif parent:
        details = f"of {parent}, {details}"
    if change:
        details += f"; {change}"
    return f"{trial.name} ({details}): {hypothesis.text or 'no hypothesis'}"
