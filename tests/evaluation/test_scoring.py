"""Scores of benchmarks, Acc. and Rel. by each definition."""

from __future__ import annotations

import pytest

from tests.evaluation.samples import QUESTIONS
from vllm_autoprune.evaluation.journal import MME, Answer, Question
from vllm_autoprune.evaluation.scoring import MMBENCH, Figures, Scoring, aggregate


def figures(scores: list[float | None], logprobs: list[float | None] | None = None) -> Figures:
    answers = {
        q.id: Answer(case="c", question=q.id, score=score, logprob=logprob)
        for q, score, logprob in zip(QUESTIONS, scores, logprobs or [-1.0] * 6, strict=True)
    }
    return Scoring(QUESTIONS, mme_divisor=2.0).figures(answers)


def test_figures_are_in_units_of_their_own_and_leave_out_what_is_not_scored() -> None:
    """Those of benchmarks, and Acc., are tested with the rows of a report."""
    scores = figures([1, 0, 1, 1, 1, 0])
    for figure, value in (
        (scores.accuracy, 100 * 4 / 6), (scores.accuracy_plus, 50), (scores.logprob, -1),
    ):  # fmt: skip
        assert figure is not None and figure[0] == pytest.approx(value)
    scores = figures([None, *[1.0] * 5])
    assert list(scores.benchmarks) == [MME] and scores.acc is None
    assert scores.accuracy is not None and scores.accuracy[0] == 100.0
    assert figures([1.0] * 6, [-1.0, -1.0, -1.0, None, -1.0, -1.0]).logprob is None


def test_categories_of_mme_are_summed() -> None:
    """Two categories with everything right are 400 points, as MME's perception of ten is 2000."""
    questions = [
        Question(id=f"{c}{i}", benchmark=MME, image=f"{c}{i // 2}", category=c, pair=f"{c}{i // 2}")
        for c in ("count", "scene")
        for i in range(4)
    ]
    for right, points in ((("count", "scene"), 400.0), (("count",), 200.0)):
        answers = {
            q.id: Answer(case="c", question=q.id, score=float(q.category in right))
            for q in questions
        }
        scores = Scoring(questions, mme_divisor=4.0).figures(answers)
        assert scores.benchmarks[MME][0] == points
        assert scores.acc is not None and scores.acc[0] == points / 4


FULL = {"GQA": 60.0, "MME": 1600.0, "MMB-EN": 40.0, "MMB-CN": 20.0}
PRUNED = {"GQA": 30.0, "MME": 1600.0, "MMB-EN": 60.0, "MMB-CN": 20.0}


def test_acc_and_rel_by_hand() -> None:
    assert aggregate(FULL, FULL, 20).acc == (60 + 80 + 40 + 20) / 4
    assert aggregate({"MME": 2800.0}, {"MME": 2800.0}, 28).acc == 100
    pruned = aggregate(PRUNED, FULL, 20)
    assert pruned.ratio_of_means == pytest.approx(100 * 190 / 200)
    assert pruned.mean_of_ratios == pytest.approx(100 * (0.5 + 1 + 1.5 + 1) / 4)
    without = aggregate(PRUNED, FULL, 20, MMBENCH)
    assert without.acc == (30 + 80) / 2
    assert without.ratio_of_means == pytest.approx(100 * 110 / 140)
    assert without.mean_of_ratios == pytest.approx(75)


@pytest.mark.parametrize("other", [{"GQA": 1.0}, {**FULL, "POPE": 80.0}])
def test_scores_on_other_benchmarks_are_refused(other: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="not scored on the same benchmarks"):
        aggregate(other, FULL, 20)
    with pytest.raises(ValueError, match="no benchmark is left"):
        aggregate({"MMB-EN": 50.0}, {"MMB-EN": 50.0}, 20, MMBENCH)
