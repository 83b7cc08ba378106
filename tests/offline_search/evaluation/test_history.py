from __future__ import annotations

import numpy as np
import pytest

from offline_search.history import History, Trial
from offline_search.ledger import ProposalRecord, Status, TrialRecord
from vllm_autoprune.tpdsl.loading import load_state

EASY, HARD = [-1.0] * 4, [-3.0] * 4


def trial(index: int, values: list[float], status: Status = "evaluated") -> Trial:
    result = TrialRecord(
        round=1, index=index, status=status, objective=float(np.mean(values)),
        examples=len(values),
    )  # fmt: skip
    proposal = ProposalRecord(round=1, index=index, origin="tpe")
    return Trial(proposal, result, load_state("autoprune"), np.array(values))


def history(*trials: Trial, base: float = -2.0) -> History:
    result = TrialRecord(round=0, index=0, status="evaluated", objective=base)
    return History(result, np.array(EASY + HARD), list(trials))


def test_an_objective_of_exactly_zero_counts() -> None:
    perfect, poor = trial(0, [0.0] * 8), trial(1, [-1.0] * 8)
    known = history(perfect, poor)
    assert known.best() is perfect and perfect.score == 0.0
    assert known.ranked() == [perfect, poor]
    assert known.best_values() is perfect.values


def test_a_base_policy_as_good_as_the_unpruned_model_stays_the_reference() -> None:
    known = history(trial(0, [-1.0] * 8), base=0.0)
    assert known.best_values() is known.base_values


def test_a_trial_that_was_not_measured_has_no_score() -> None:
    with pytest.raises(ValueError, match="not evaluated to the end"):
        _ = trial(0, EASY, "dropped").score


def test_dropped_trials_are_estimated_by_the_difficulty_of_their_examples() -> None:
    """Both are at -1 on the easy half, where the average trial is at -1 as well."""
    dropped = trial(1, EASY, "dropped")
    known = history(trial(0, EASY + HARD), dropped)
    assert known.estimate(dropped) == pytest.approx(-2.0)
    assert known.objective_of("1.1") == pytest.approx(-2.0)
