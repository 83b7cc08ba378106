"""Scores of answers, their errors, and what is known of trials."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from offline_search.dataset import Dataset
from offline_search.evaluator import EvaluationJob
from offline_search.history import (
    Answers,
    History,
    Trial,
    accuracy,
    accuracy_plus,
    bootstrap_mean,
    mme_total,
    paired_error,
    relative_values,
    significantly_below,
)
from offline_search.ledger import TrialRecord
from offline_search.settings import Settings
from tests.offline_search.synthetic import Searches, SyntheticEvaluator, trial
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


MIXED = [
    *(example(n // 2, "c", n // 2) for n in range(8)),
    *(example(10 + n // 3, "d") for n in range(6)),
    example(9, "c"),
]


def mme_points(chosen: Answers) -> float:
    """MME's total as MME defines it."""
    points = 0.0
    for name in ("c", "d"):
        rows = [row for row, each in enumerate(MIXED) if each.category == name]
        part = answers(*(chosen.right[row] for row in rows))
        points += 100 * (accuracy(part) + accuracy_plus([MIXED[row] for row in rows], part))
    return points


@pytest.mark.parametrize("seed", range(8))
def test_values_of_examples_have_mmes_total_as_their_mean(seed: int) -> None:
    rng, settings = np.random.default_rng(seed), Settings(objective="mme")
    pruned, full = (answers(*rng.integers(0, 2, 15)) for _ in range(2))
    values = relative_values(settings, MIXED, pruned, full)
    assert mme_total(MIXED, pruned) == pytest.approx(mme_points(pruned))
    assert 1000 * values.mean() == pytest.approx(mme_points(pruned) - mme_points(full))
    # After a part of the examples, those of the other categories do not change.
    part = relative_values(settings, MIXED, answers(*pruned.right[:8]), full)
    assert part == pytest.approx(values[:8])


async def test_a_search_for_mmes_total_finds_what_log_probability_hides(
    data: Dataset, tmp_path: Path
) -> None:
    class MoreRightLessLikely(SyntheticEvaluator):
        """An exchange of few tokens answers more questions, at lower probabilities."""

        def answer(self, job: EvaluationJob) -> Answers:
            count = job.stop - job.start
            if job.candidate is None:
                return Answers((0.0,) * count, (True,) * count)
            few = '"q_e":1' in job.candidate.model_dump_json()  # type: ignore[union-attr]
            right = tuple(bool(few or number % 2) for number in range(count))
            return Answers((-2.0 if few else -1.0,) * count, right)

    search = Searches(data, tmp_path)
    for objective, total, values in (("mme", 400, {0.0, -0.3}), ("quality", 100, {-1.0, -2.0})):
        winner = await search(
            (), MoreRightLessLikely(data, probes=False), objective, objective=objective,
            strategy="random", rounds=4, per_round=5, proposer="",
        )  # fmt: skip
        assert {trial.objective for trial in search.records(TrialRecord)} == values
        assert winner.test.mme_total == total
        assert ("thousand points" in str(winner.state)) == (objective == "mme")


def test_scores_are_relative_to_the_unpruned_model() -> None:
    full = Answers((-0.5, -0.5, -0.5), (True, True, True))
    pruned = Answers((-1.0, -0.5, -0.25), (True, True, True))
    assert relative_values(Settings(), [], pruned, full).tolist() == [-0.5, 0.0, 0.25]


def test_an_interval_resamples_images_not_questions() -> None:
    per_image = np.random.default_rng(0).normal(size=50)
    shared = bootstrap_mean([example(i // 4) for i in range(200)], np.repeat(per_image, 4))
    lone = bootstrap_mean([example(i) for i in range(200)], np.repeat(per_image, 4))
    assert shared.value == lone.value == pytest.approx(per_image.mean(), abs=1e-5)
    assert shared.high - shared.low > 1.5 * (lone.high - lone.low)
    assert shared.low < shared.value < shared.high


def test_the_error_of_a_paired_difference_is_that_of_resampled_images() -> None:
    generator = np.random.default_rng(3)
    counts = [1 + image % 5 for image in range(60)]
    rows = [example(image) for image, count in enumerate(counts) for _ in range(count)]
    gaps = generator.normal(size=60).repeat(counts) - 1.0
    interval = bootstrap_mean(rows, gaps)
    assert paired_error(rows, gaps) == pytest.approx((interval.high - interval.low) / 3.92, rel=0.1)
    constant = np.full(len(rows), -1.0)
    assert paired_error(rows, constant) == pytest.approx(0.0), "however many questions an image has"


def test_only_clearly_worse_candidates_are_significantly_below() -> None:
    generator = np.random.default_rng(1)
    rows = [example(i // 2) for i in range(80)]
    rival, noise = generator.normal(size=80), 0.1 * generator.normal(size=80)
    assert significantly_below(rows, rival - 0.5 + noise, rival)
    assert not significantly_below(rows, rival + noise, rival)
    assert not significantly_below(rows, rival + 0.5 + noise, rival)
    assert not significantly_below(rows[:6], rival[:6] - 0.5, rival), "three images tell nothing"
    rows = [example(i) for i in range(40)]
    dropped = 0
    for _ in range(500):
        rival = generator.normal(size=40)
        dropped += significantly_below(rows, rival + generator.normal(size=40), rival)
    assert dropped / 500 < 0.01, "equal candidates are rarely dropped"


EASY, HARD = [-1.0] * 4, [-3.0] * 4
STATE = load_state("autoprune")


def history(*trials: Trial, base: float = -2.0) -> History:
    result = TrialRecord(round=0, index=0, status="evaluated", objective=base)
    return History(result, np.array(EASY + HARD), list(trials))


def test_the_best_trial_may_be_as_good_as_the_unpruned_model() -> None:
    perfect, poor = trial("1.0", [0.0] * 8, STATE), trial("1.1", [-1.0] * 8, STATE)
    known = history(perfect, poor)
    assert known.best() is perfect and perfect.score == 0.0
    assert known.ranked() == [perfect, poor]
    assert known.best_values() is perfect.values
    known = history(poor, base=0.0)
    assert known.best_values() is known.base_values


def test_dropped_trials_are_estimated_by_the_difficulty_of_their_examples() -> None:
    """Both are at -1 on the easy half, where the average trial is at -1 as well."""
    dropped = trial("1.1", EASY, STATE, "dropped")
    known = history(trial("1.0", EASY + HARD, STATE), dropped)
    assert known.estimate(dropped) == pytest.approx(-2.0)
    assert known.objective_of("1.1") == pytest.approx(-2.0)
    with pytest.raises(ValueError, match="not evaluated to the end"):
        _ = dropped.score
