"""Scores of benchmarks, Acc. and Rel. by each definition."""

from __future__ import annotations

import pytest

from tests.evaluation.samples import QUESTIONS, answers
from vllm_autoprune.evaluation.journal import MME, Answer, Question
from vllm_autoprune.evaluation.scoring import (
    MMBENCH,
    Figures,
    Scoring,
    accuracy,
    mean_of_ratios,
    ratio_of_means,
)


def figures(values: list[float]) -> Figures:
    answers_by_id = {answer.question: answer for answer in answers("c", values)}
    return Scoring(QUESTIONS, mme_divisor=2.0).figures(answers_by_id)


def test_each_benchmark_is_scored_in_its_own_unit() -> None:
    scores = figures([1, 0, 1, 1, 1, 0])
    assert {name: f[0] for name, f in scores.benchmarks.items()} == {"colour": 50.0, MME: 125.0}
    assert scores.acc is not None and scores.acc[0] == (50 + 125 / 2) / 2
    assert scores.accuracy is not None and scores.accuracy[0] == pytest.approx(100 * 4 / 6)
    assert scores.accuracy_plus is not None and scores.accuracy_plus[0] == 50.0
    assert scores.logprob is not None and scores.logprob[0] == -1.0


def test_categories_of_mme_are_summed() -> None:
    """Two categories with everything right are 400 points, as MME's perception of ten is 2000."""
    questions = [
        Question(id=f"{c}{i}", benchmark=MME, image=f"{c}{i // 2}", category=c, pair=f"{c}{i // 2}")
        for c in ("count", "scene")
        for i in range(4)
    ]
    scoring = Scoring(questions, mme_divisor=4.0)
    whole = scoring.figures({q.id: Answer(case="c", question=q.id, score=1.0) for q in questions})
    assert whole.benchmarks[MME][0] == 400.0
    half = scoring.figures(
        {
            q.id: Answer(case="c", question=q.id, score=float(q.category == "count"))
            for q in questions
        }
    )
    assert half.benchmarks[MME][0] == 200.0
    assert half.acc is not None and half.acc[0] == 50.0


def test_a_benchmark_without_scores_of_single_answers_is_left_out() -> None:
    answers_by_id = {answer.question: answer for answer in answers("c", [1.0] * 6)}
    answers_by_id["0"] = answers_by_id["0"].model_copy(update={"score": None})
    scores = Scoring(QUESTIONS, 2.0).figures(answers_by_id)
    assert list(scores.benchmarks) == [MME] and scores.acc is None
    assert scores.accuracy is not None and scores.accuracy[0] == 100.0


def test_a_missing_log_probability_omits_their_mean() -> None:
    answers_by_id = {answer.question: answer for answer in answers("c", [1.0] * 6)}
    answers_by_id["3"] = answers_by_id["3"].model_copy(update={"logprob": None})
    assert Scoring(QUESTIONS, 2.0).figures(answers_by_id).logprob is None


FULL = {"GQA": 60.0, "MME": 1600.0, "MMB-EN": 40.0, "MMB-CN": 20.0}
PRUNED = {"GQA": 30.0, "MME": 1600.0, "MMB-EN": 60.0, "MMB-CN": 20.0}


def test_acc_divides_only_mme() -> None:
    assert accuracy(FULL, 20) == (60 + 80 + 40 + 20) / 4
    assert accuracy({"MME": 2800.0}, 28) == 100


def test_the_two_definitions_of_rel_differ() -> None:
    assert ratio_of_means(PRUNED, FULL, 20) == pytest.approx(100 * 190 / 200)
    assert mean_of_ratios(PRUNED, FULL) == pytest.approx(100 * (0.5 + 1 + 1.5 + 1) / 4)


def test_benchmarks_can_be_left_out_of_both() -> None:
    assert accuracy(PRUNED, 20, MMBENCH) == (30 + 80) / 2
    assert ratio_of_means(PRUNED, FULL, 20, MMBENCH) == pytest.approx(100 * 110 / 140)
    assert mean_of_ratios(PRUNED, FULL, MMBENCH) == pytest.approx(75)


def test_the_divisor_cancels_out_of_a_mean_of_ratios() -> None:
    halved = {name: score / (2 if name == "MME" else 1) for name, score in PRUNED.items()}
    full = {name: score / (2 if name == "MME" else 1) for name, score in FULL.items()}
    assert mean_of_ratios(halved, full) == pytest.approx(mean_of_ratios(PRUNED, FULL))


@pytest.mark.parametrize("other", [{"GQA": 1.0}, {**FULL, "POPE": 80.0}])
def test_scores_on_other_benchmarks_are_refused(other: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="not scored on the same benchmarks"):
        mean_of_ratios(other, FULL)
    with pytest.raises(ValueError, match="not scored on the same benchmarks"):
        ratio_of_means(other, FULL, 20)


def test_without_benchmarks_there_is_no_mean() -> None:
    with pytest.raises(ValueError, match="no benchmark is left"):
        accuracy({"MMB-EN": 50.0}, 20, MMBENCH)
