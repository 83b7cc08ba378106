"""Differences between policies by hand: verdicts, and the weights of questions by category."""

from __future__ import annotations

import numpy as np

from offline_search.differences import Difference, Strata, compare
from tests.tables import parametrize_from_file
from vllm_autoprune.evaluation.questions import Example


@parametrize_from_file("value", "error", "resolution", "errors", "verdict")
def test_a_difference_is_held_to_its_resolution_and_to_its_error(
    value: float, error: float, resolution: float, errors: float, verdict: str
) -> None:
    difference = Difference(value, error)
    assert difference.verdict(resolution, errors) == verdict
    opposite = {"better": "worse", "worse": "better"}.get(verdict, verdict)
    assert Difference(-value, error).verdict(resolution, errors) == opposite


@parametrize_from_file("value", "error", "resolution", "verdict")
def test_a_verdict_of_a_prompt_follows_from_its_printed_figures(
    value: float, error: float, resolution: float, verdict: str
) -> None:
    """Figures have three decimals; what is cut off would decide otherwise."""
    assert Difference(value, error).judge(resolution, 3) == verdict


def test_answered_questions_stand_for_the_categories_of_all() -> None:
    """Half of the population is a, a quarter each b and c; nobody answered c."""
    examples = [
        Example(image=f"{number}", question="?", answer="x", category=category)
        for number, category in enumerate("aaaabbcc")
    ]
    strata = Strata.of(examples, np.ones(8, dtype=bool))
    answered = np.array([1, 1, 0, 0, 1, 0, 0, 0], dtype=bool)
    spread = 0.25 / 3
    expected = [0.25 + spread, 0.25 + spread, 0, 0, 0.25 + spread, 0, 0, 0]
    assert np.allclose(strata.weights(answered), expected)
    first_half = Strata.of(examples, np.arange(8) < 4)
    assert first_half.shares.tolist() == [1.0, 0.0, 0.0]


def test_a_difference_is_the_same_in_whatever_order_it_is_added() -> None:
    """As vector units of other processors add; replays compare figures to the last digit."""
    generator = np.random.default_rng(5)
    examples = [
        Example(image=f"{number}", question="?", answer="x") for number in range(96)
    ]
    values = generator.normal(size=96).round(4)
    reference = generator.normal(size=96).round(4)
    differences = set[Difference]()
    plain_means = set[float]()
    for _ in range(50):
        order = generator.permutation(96)
        permuted = [examples[row] for row in order]
        differences.add(compare(permuted, values[order], reference[order]))
        plain_means.add(float(values[order].mean() - reference[order].mean()))
    assert len(differences) == 1 < len(plain_means)
