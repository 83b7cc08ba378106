"""Outcomes of hypotheses: what the candidates of the last round measured, beside what they expect.

Scores are in thousandths, as in the rest of the summary.
"""

from __future__ import annotations

from collections.abc import Iterator

from offline_search.candidates.hypothesis import BASE_PARENT, Expectation, Hypothesis
from offline_search.evaluation.answers import paired_error
from offline_search.evaluation.history import History, Trial
from vllm_autoprune.statistics import Floats

_REASON_CHARACTERS = 100


def describe_hypotheses(history: History) -> Iterator[str]:
    """A line for each hypothesis of the last round, and what the lines have; none without any."""
    last = max((trial.proposal.round for trial in history.trials), default=0)
    tested = [
        (trial, trial.proposal.hypothesis)
        for trial in history.trials
        if trial.proposal.round == last and trial.proposal.hypothesis is not None
    ]
    if tested:
        yield "Hypotheses of the last round; score, difference to the parent ± its standard error:"
    for trial, hypothesis in tested:
        parent = _parent(trial)
        purpose = f"{hypothesis.purpose or 'no purpose'} of {parent}, expected {hypothesis.expect}"
        outcome = _outcome(trial, hypothesis, history)
        yield f"- {trial.name} ({purpose}): {hypothesis.text or 'no hypothesis'} => {outcome}"


def _parent(trial: Trial) -> str:
    return trial.proposal.parents[0] if trial.proposal.parents else BASE_PARENT


def _outcome(trial: Trial, hypothesis: Hypothesis, history: History) -> str:
    values = history.values_of(trial.name)
    if values is None:
        return f"not measured, {trial.result.status}: {trial.result.reason[:_REASON_CHARACTERS]}"
    reference = history.values_of(_parent(trial))
    if reference is None:  # its parent repeats a candidate whose measurement failed
        return f"{_score(float(values.mean()))}, parent not measured"
    count = min(len(values), len(reference))
    gaps: Floats = values[:count] - reference[:count]
    gap, error = float(gaps.mean()), paired_error(history.examples, gaps)
    asked = f" on the first {count} questions" if count < len(history.base_values) else ""
    verdict = "confirmed" if _is_as_expected(gap, error, hypothesis.expect) else "not confirmed"
    return f"{_score(float(values.mean()))}, {_score(gap)} ± {1000 * error:.0f}{asked}: {verdict}"


def _is_as_expected(gap: float, error: float, expected: Expectation) -> bool:
    """Whether a paired difference is as expected by two standard errors."""
    if expected == "same":
        return abs(gap) <= 2 * error < float("inf")
    return gap > 2 * error if expected == "higher" else gap < -2 * error


def _score(value: float) -> str:
    return f"{1000 * value:+.0f}"
