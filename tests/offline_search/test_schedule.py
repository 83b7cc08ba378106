"""Course of a search: what its rounds may spend, and plateaus."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offline_search.history import History, gave_up
from offline_search.ledger import Status
from offline_search.schedule import EvaluationBudget, Plateau
from tests.offline_search.synthetic import settings_of, trial
from tests.tables import parametrize_from_file
from vllm_autoprune.evaluation.questions import Example

RACED = settings_of(strategy="autoprune+", rounds=4, per_round=3, budgets=(8, 4))
ROUNDS = settings_of(rounds=4, per_round=3)
EXAMPLES = [
    Example(image=f"{number}.png", question="Q?", answer="a", category="all")
    for number in range(16)
]
BASE = np.full(16, -3.0)


def history_of(*gains: float) -> History:
    """A history of one candidate a round, with these gains over the base policy."""
    trials = [trial(f"{n}.0", BASE + gain) for n, gain in enumerate(gains, 1)]
    return History(trial("0.0", BASE), trials, EXAMPLES, resolution=0.1)


def test_a_race_ends_with_its_answers_and_other_searches_with_their_rounds() -> None:
    raced = EvaluationBudget(RACED, questions=10)
    assert raced.per_candidate == 20 and raced.answers == 4 * 3 * 20
    assert raced.is_spent(240) and not raced.is_spent(239)
    assert raced.share(9, 60) == 0.25 and raced.share(1, 300) == 1.0
    fixed = EvaluationBudget(ROUNDS, questions=10)
    assert not fixed.is_spent(10**6)
    assert fixed.share(1, 10**6) == 0.25


def test_the_last_round_of_a_race_is_smaller() -> None:
    raced = EvaluationBudget(RACED, questions=10)
    spent = {0: 9, 180: 9, 190: 6, 220: 3, 239: 3}
    assert {answers: raced.count_proposals(answers) for answers in spent} == spent
    assert EvaluationBudget(ROUNDS, questions=10).count_proposals(239) == 3


@parametrize_from_file("raced", "number", "spent", "text")
def test_prompts_say_which_round_it_is_and_whether_another_follows(
    raced: bool, number: int, spent: int, text: str
) -> None:
    budget = EvaluationBudget(RACED if raced else ROUNDS, questions=10)
    """A smaller round that follows may ask the model nothing: that its request is the last."""
    sentences = budget.describe_round(number, spent, resolution=0.1)
    assert sentences.startswith(text) and ("last" in sentences) == ("last" in text)


def test_prompts_say_what_a_candidate_costs_and_when_it_is_dropped() -> None:
    raced = EvaluationBudget(RACED, questions=128).describe_round(1, 0, 0.0)
    assert raced.endswith(
        "Another follows if answers are left. A candidate is asked at most 128 questions in its "
        "round, the same in every round, each at 2 budgets. After 16 and after 64 of them "
        "candidates are dropped: those behind the leader before the round, by more than 3 standard "
        "errors; and of the others those outranked, which are all but the best 1 in 3, then the "
        "best 1 in 2 by the mean of their answers, all of which are to the same questions."
    )
    tied = EvaluationBudget(RACED, questions=128).describe_round(1, 0, 0.1)
    assert "half of the answers, 4 rounds in a row found nothing better by" in tied
    assert (
        "those tied with it, whose difference and whose two standard errors are each"
        in tied
    )
    several = ROUNDS.model_copy(update={"budgets": (8, "1/4")})
    text = EvaluationBudget(several, questions=10).describe_round(1, 0, 0.0)
    assert text.endswith(
        "A candidate is asked 10 questions in its round, the same in every round, each at 2 "
        "budgets."
    )
    fresh = EvaluationBudget(ROUNDS, questions=10, is_fresh=True)
    asked = (
        "The questions of this round, others than those of the round before, are asked "
    )
    asked += "of earlier candidates that lead"
    assert f"{asked} too. " in fresh.describe_round(2, 0, 0.0)
    assert "the same in every" not in fresh.describe_round(1, 0, 0.0)
    # What earlier candidates are asked counts, so that a round may take more than it usually does.
    raced_anew = EvaluationBudget(RACED, questions=10, is_fresh=True)
    counted = " of all its candidates together, and more of earlier ones."
    assert counted in raced_anew.describe_round(2, 0, 0.0)
    assert counted not in raced_anew.describe_round(1, 0, 0.0)
    assert "the round before" not in fresh.describe_round(1, 0, 0.0)
    lists = ROUNDS.model_copy(update={"proposals_per_reply": 3})
    fresh = EvaluationBudget(lists, questions=10, is_fresh=True)
    assert f"{asked} and of parents of its candidates too. " in fresh.describe_round(
        2, 0, 0.0
    )


def levels(gains: Sequence[float], share: float = 0.4) -> list[int]:
    """Levels of the plateau after each round."""
    plateau = Plateau()
    after_rounds = []
    for number in range(1, len(gains) + 1):
        plateau.update(history_of(*gains[:number]), number, share)
        after_rounds.append(plateau.level)
    return after_rounds


def test_two_rounds_that_tie_with_the_leader_are_a_plateau_until_one_is_better() -> (
    None
):
    assert levels([1.0, 1.05, 0.95]) == [0, 0, 1]
    assert levels([1.0, 1.05, 0.5]) == [0, 0, 0], "a round that is worse is no tie"
    assert levels([1.0, 1.0, 1.0, 2.0, 2.0]) == [0, 0, 1, 1, 0]


def test_a_search_ends_after_four_rounds_without_gain_in_its_second_half() -> None:
    gains = [1.0, 0.5, 0.5, 0.5, 0.5]
    assert levels(gains, share=0.5) == [0, 0, 0, 0, 2]
    assert levels(gains, share=0.49) == [0, 0, 0, 0, 0]
    assert levels([*gains[:4], 2.0], share=0.5) == [0, 0, 0, 0, 0]


def test_nothing_is_a_plateau_without_a_resolution() -> None:
    history = history_of(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    history.resolution = 0.0
    plateau = Plateau()
    for number in range(1, 7):
        plateau.update(history, number, 1.0)
    assert plateau == Plateau()


def test_a_search_gives_up_after_25_invalid_or_unsafe_candidates_in_a_row() -> None:
    statuses: list[Status] = ["invalid", "unsafe"] * 12
    cases: list[tuple[Status, bool]] = [
        ("invalid", True),
        ("unsafe", True),
        ("evaluated", False),
        ("unevaluated", False),  # the server failed, not the proposer
    ]
    for last, is_given_up in cases:
        row: list[Status] = ["evaluated", *statuses, last]
        results = [
            trial(f"1.{n}", status=status).result for n, status in enumerate(row)
        ]
        assert gave_up(results) == is_given_up
        assert not gave_up(results[2:])
