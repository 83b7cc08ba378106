from __future__ import annotations

import numpy as np
import pytest

from offline_search.history import (
    Answers,
    History,
    Trial,
    accuracy,
    accuracy_plus,
    bootstrap_mean,
    mme_total,
    paired_error,
    relative_logprob,
    significantly_below,
)
from offline_search.ledger import ProposalRecord, Status, TrialRecord
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.tpdsl.loading import load_state


def example(image: int, category: str = "digit", pair: int | None = None) -> Example:
    return Example(image=f"{image}", question="q", answer="a", category=category, pair=pair)


def answers(*right: int) -> Answers:
    return Answers(tuple(-1.0 - i for i in range(len(right))), tuple(map(bool, right)))


def test_accuracy_plus_requires_both_answers_of_a_pair() -> None:
    paired = [example(0, pair=0), example(0, pair=0), example(1, pair=1), example(1, pair=1)]
    assert accuracy(answers(1, 1, 1, 0)) == 0.75
    assert accuracy_plus(paired, answers(1, 1, 1, 0)) == 0.5
    mixed = [*paired, example(2)]
    assert accuracy_plus(mixed, answers(1, 1, 1, 1, 0)) == 1.0, "a lone question is in no pair"
    alone = [example(0), example(0), example(1), example(1)]
    assert accuracy_plus(alone, answers(1, 1, 1, 0)) == 0.5, "without pairs: by image"


def test_mme_total_is_accuracy_and_accuracy_plus_of_each_category() -> None:
    rows = [example(0, "a", 0), example(0, "a", 0), example(1, "b", 1), example(1, "b", 1)]
    assert mme_total(rows, answers(1, 1, 1, 0)) == pytest.approx(200 + 50)
    assert mme_total(rows, answers(1, 1, 1, 1)) == pytest.approx(400)


def test_scores_are_relative_to_the_unpruned_model() -> None:
    full = Answers((-0.5, -0.5, -0.5), (True, True, True))
    pruned = Answers((-1.0, -0.5, -0.25), (True, True, True))
    values = relative_logprob(pruned, full)
    assert values.tolist() == [-0.5, 0.0, 0.25]


def test_an_interval_resamples_images_not_questions() -> None:
    generator = np.random.default_rng(0)
    per_image = generator.normal(size=50)
    rows = [example(i // 4) for i in range(200)]
    shared = bootstrap_mean(rows, np.repeat(per_image, 4))
    lone = bootstrap_mean([example(i) for i in range(200)], np.repeat(per_image, 4))
    assert shared.value == lone.value == pytest.approx(per_image.mean(), abs=1e-5)
    assert shared.high - shared.low > 1.5 * (lone.high - lone.low)
    assert shared.low < shared.value < shared.high


def test_only_clearly_worse_candidates_are_significantly_below() -> None:
    generator = np.random.default_rng(1)
    rows = [example(i // 2) for i in range(80)]
    rival = generator.normal(size=80)
    noise = 0.1 * generator.normal(size=80)
    assert significantly_below(rows, rival - 0.5 + noise, rival)
    assert not significantly_below(rows, rival + noise, rival)
    assert not significantly_below(rows, rival + 0.5 + noise, rival)
    assert not significantly_below(rows[:6], rival[:6] - 0.5, rival), "three images tell nothing"


def test_a_constant_gap_has_no_error_however_many_questions_an_image_has() -> None:
    rows = [example(image) for image in range(20) for _ in range(1 + image % 2)]
    assert paired_error(rows, np.full(len(rows), -1.0)) == pytest.approx(0.0)


def test_the_error_of_a_paired_difference_is_that_of_resampled_images() -> None:
    generator = np.random.default_rng(3)
    rows = [example(image) for image in range(60) for _ in range(1 + image % 5)]
    gaps = generator.normal(size=60).repeat([1 + image % 5 for image in range(60)]) - 1.0
    interval = bootstrap_mean(rows, gaps)
    assert paired_error(rows, gaps) == pytest.approx((interval.high - interval.low) / 3.92, rel=0.1)


def test_equal_candidates_are_rarely_significantly_below() -> None:
    generator = np.random.default_rng(2)
    rows = [example(i) for i in range(40)]
    dropped = 0
    for _ in range(500):
        rival = generator.normal(size=40)
        dropped += significantly_below(rows, rival + generator.normal(size=40), rival)
    assert dropped / 500 < 0.01


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
