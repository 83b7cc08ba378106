"""Figures of one case, by value."""

from __future__ import annotations

from vllm_autoprune.evaluation.journal import PAIRS, Answer, Question, Setup
from vllm_autoprune.evaluation.scoring import Figures, Scoring


def figures_of(*scores: float | None) -> Figures:
    """Of yes/no questions about images in pairs, in one category."""
    questions = [
        Question(
            id=str(n),
            benchmark=PAIRS,
            image=str(n // 2),
            category="objects",
            pair=str(n // 2),
        )
        for n in range(len(scores))
    ]
    answers = {
        str(n): Answer(case="full", question=str(n), score=score)
        for n, score in enumerate(scores)
    }
    setup = Setup(suite="yes/no", model="m", data="d", scorer="s")
    return Scoring(questions, setup).figures(answers)


def test_a_benchmark_of_pairs_is_the_mean_of_accuracy_and_accuracy_plus() -> None:
    figures = figures_of(1.0, 1.0, 1.0, 0.0)
    assert figures.benchmarks[PAIRS][0] == (75.0 + 50.0) / 2
    assert figures.metrics["accuracy_plus"][0] == 50.0


def test_an_answer_without_a_score_leaves_its_benchmark_topics_and_pair_out() -> None:
    figures = figures_of(1.0, 1.0, 0.0, None)
    assert PAIRS not in figures.benchmarks
    assert not figures.topics
    assert figures.metrics["accuracy_plus"][0] == 100.0
