"""Hypotheses in summaries H_t: which are listed, and what confirms or refutes them."""

from __future__ import annotations

import re

import numpy as np

from offline_search.candidates import Expectation, minimal_state, paper_state
from offline_search.history import History, Trial
from offline_search.summary import summarize
from tests.offline_search.histories import BASE, EXAMPLES, NOISE, SETTINGS, history_of
from tests.offline_search.synthetic import trial
from tests.tables import parametrize_from_file


def outcomes(*trials: Trial, resolution: float = 0.0) -> dict[str, str]:
    """What the summary says of each hypothesis."""
    history = history_of(*trials)
    history.resolution = resolution
    lines = summarize(history).splitlines()
    return dict(line[2:].split(" => ", 1) for line in lines if " => " in line)


@parametrize_from_file("change", "expect", "outcome")
def test_a_hypothesis_is_confirmed_by_two_standard_errors(
    change: float, expect: Expectation, outcome: str
) -> None:
    trials = [
        trial("1.0", BASE + 9.0),
        trial("2.0", BASE + change + NOISE, expect=expect),
    ]
    line = f"2.0 (ablate of base, expected {expect}): Why 2.0."
    assert outcomes(*trials) == {line: outcome}
    trials = [
        trial("1.0", BASE),
        trial("2.0", BASE + change + NOISE, None, "evaluated", "1.0", expect=expect),
    ]
    assert [*outcomes(*trials).values()] == [outcome], (
        "its parent's values are the base policy's"
    )


@parametrize_from_file("resolution", "expect", "outcome")
def test_what_the_resolution_does_not_tell_apart_is_called_the_same(
    resolution: float, expect: Expectation, outcome: str
) -> None:
    tested = trial("2.0", BASE + 0.1 + NOISE, expect=expect)
    assert [*outcomes(tested, resolution=resolution).values()] == [outcome]


def test_what_hypotheses_are_compared_on() -> None:
    lines = outcomes(
        trial("1.0", [-1.0] * 4 + [-9.0] * 12, expect="higher"),
        trial("2.0", -2.0 + NOISE[:4], None, "dropped", "1.0", expect="lower"),
        trial("2.1", None, None, "same", "1.0", reason="1.0", expect="same"),
        trial("2.2", None, None, "same", reason="base", expect="higher"),
        trial(
            "2.3",
            None,
            None,
            "unsafe",
            reason="preserve_budget failed",
            expect="higher",
        ),
        trial("2.4", None, None, "invalid", reason="x" * 500, expect="higher"),
        trial("2.5", [-2.0], None, "dropped", expect="same"),
        trial("2.6", BASE),
    )
    assert [line[:3] for line in lines] == [f"2.{n}" for n in range(6)], (
        "nothing says what 1.0 was"
    )
    values = list(lines.values())
    assert values[0] == "-1.00 ± 0.12, lower (of 4, 0 up, 4 down): confirmed"
    assert values[1:5] == [
        "the tokens and rows of its parent: confirmed",
        "the tokens and rows of its parent: untested",
        "not measured, unsafe: preserve_budget failed",
        f"not measured, invalid: {'x' * 100}",
    ]
    assert values[5] == "+1.00 ± unknown, undecided (of 1, 1 up, 0 down)"


def test_a_parent_that_is_not_listed_is_told_by_what_it_duplicates() -> None:
    """As the difference would be to nobody knows whom."""
    paper = paper_state(SETTINGS)
    lines = outcomes(
        trial("1.0", BASE + 1.0, minimal_state(SETTINGS)),
        trial("1.1", None, minimal_state(SETTINGS), "same", reason="1.0"),
        trial("2.0", BASE + 2.0, paper, parent="1.1", expect="higher"),
        trial("3.0", BASE, minimal_state(SETTINGS)),
    )
    (line,) = lines
    assert line.startswith("2.0 (of 1.0, expected higher")


def test_an_effect_of_nothing_refutes_nothing() -> None:
    tested = trial("2.0", BASE, expect="higher")
    (outcome,) = outcomes(tested).values()
    assert outcome.endswith("+0.00 ± 0.00, same (of 16, 0 up, 0 down): untested")


def test_hypotheses_of_all_rounds_are_kept_with_their_verdicts() -> None:
    """Where there is no room for all, undecided ones of early rounds are left out first."""
    trials = [
        trial(
            f"{number}.{index}",
            BASE + (0.5 if index else 0.1) + NOISE,
            paper_state(SETTINGS),
            expect="higher",
        )
        for number in range(1, 61)
        for index in range(2)
    ]
    lines = [*outcomes(*trials[:8])]
    assert [line[:3] for line in lines] == [
        "4.0",
        "4.1",
        "3.1",
        "2.1",
        "1.1",
        "3.0",
        "2.0",
        "1.0",
    ]
    assert lines[0].startswith("4.0 (ablate of base, expected higher): ")
    assert lines[2] == "3.1 (of base, expected higher): Why 3.1."
    text = summarize(history_of(*trials))
    assert (
        "- 30.1 (of base, expected higher): Why 30.1. => +0.500 ± 0.052, higher" in text
    )
    assert " more hypotheses are not listed." in text


def test_a_few_shared_questions_are_judged_by_their_own_differences() -> None:
    """An estimate from a category of hard questions may contradict them."""
    base = np.array([-1.0] * 4 + [-9.0] * 12)
    few = np.full(16, np.nan)
    few[:6] = base[:6] + np.tile([0.5, 0.4], 3)
    tested = trial("2.0", few, None, "dropped", expect="higher")
    rival = trial("1.0", base + np.repeat([0.0, 6.0], 8))
    history = History(trial("0.0", base), [rival, tested], EXAMPLES)
    (line,) = (line for line in summarize(history).splitlines() if " => " in line)
    assert line.endswith("=> +0.45 ± 0.02, higher (of 6, 6 up, 0 down): confirmed")


def test_what_is_expected_to_be_the_same_can_be_confirmed() -> None:
    """By the usual error of leaders, where the search has no resolution of its own."""
    paper = paper_state(SETTINGS)
    rival = trial("1.0", BASE + 2 + 3 * NOISE, paper)
    leader = trial("1.1", BASE + 2.5, minimal_state(SETTINGS))
    tested = trial("2.0", BASE + 2.5 + 0.3 * NOISE, None, parent="1.1", expect="same")
    text = summarize(history_of(rival, leader, tested))
    assert float(re.findall(r"Resolution: ([\d.]+)\. ", text)[0]) > 0.1
    assert text.splitlines()[-1].endswith(
        "+0.000 ± 0.015, same (of 16, 8 up, 8 down): confirmed"
    )
