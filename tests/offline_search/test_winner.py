"""How finalists are ranked, and their estimates over two splits of different sizes."""

from __future__ import annotations

import numpy as np
import pytest

from offline_search.candidates import minimal_state, paper_state
from offline_search.differences import Difference
from offline_search.history import History
from offline_search.ledger import Comparison
from offline_search.winner import _combined_estimate, _Finalist, _Finals
from tests.offline_search.synthetic import BUDGET, settings_of, trial
from tests.tables import parametrize_from_file
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.statistics import Estimate, Floats
from vllm_autoprune.tpdsl.state import PruningState

SETTINGS = settings_of()
VALIDATION = Comparison(
    split="validation",
    examples=4,
    accuracy=0.5,
    mme_total=0.0,
    objective=Estimate(-1.0, -1.1, -0.9),
    gain=Estimate(0.0, 0.0, 0.0),
    accuracy_gain=Estimate(0.0, 0.0, 0.0),
)


def finalist(name: str, value: float, state: PruningState | None = None) -> _Finalist:
    values = np.full(16, value)
    return _Finalist(trial(name, values, state), VALIDATION, values)


@parametrize_from_file("gap", "error", "resolution", "winner")
def test_the_simplest_wins_of_those_within_a_standard_error_and_the_resolution(
    gap: float, error: float, resolution: float, winner: str
) -> None:
    def compare(values: Floats, reference: Floats) -> Difference:
        return Difference(float((values - reference).mean()), error)

    finalists = {
        "complex": finalist("1.0", gap, paper_state(SETTINGS)),
        "simple": finalist("1.1", 0.0, minimal_state(SETTINGS)),
    }
    finals = _Finals(finalists, np.full(16, -1.0), compare)
    assert finals.ranked(resolution, BUDGET)[0] == winner


def test_of_tied_candidates_of_one_structure_the_one_that_exchanges_less_wins() -> None:
    finalists = {
        f"q_e = {quota}": finalist(f"1.{quota}", 0.0, paper_state(SETTINGS, quota))
        for quota in (5, 2, 7)
    }
    finals = _Finals(finalists, np.full(16, -1.0), lambda *_: Difference(0.0, 0.1))
    assert finals.ranked(0.1, BUDGET) == ["q_e = 2", "q_e = 5", "q_e = 7"]


def test_of_tied_candidates_that_wins_whose_worst_model_gains_most() -> None:
    models = {"a": np.arange(16) < 8, "b": np.arange(16) >= 8}
    gains = {"even": (0.4, 0.4), "uneven": (0.9, 0.0), "behind": (0.3, 0.3)}
    finalists = {
        name: _Finalist(
            trial("1.0", state=paper_state(SETTINGS)),
            VALIDATION,
            np.repeat(values, 8) - 1.0,
        )
        for name, values in gains.items()
    }

    def compare(values: Floats, reference: Floats) -> Difference:
        return Difference(float(np.nanmean(values - reference)), 0.06)

    finals = _Finals(finalists, np.full(16, -1.0), compare, models)
    assert finals.model_gains["uneven"] == {"a": 0.9, "b": 0.0}
    assert finals.ranked(0.06, BUDGET) == ["even", "uneven", "behind"]
    assert finals.ranked(0.04, BUDGET) == ["uneven", "even", "behind"], "not tied"


def test_an_estimate_counts_every_question_of_both_splits_once() -> None:
    examples = [
        Example(image=f"{number}", question="Q?", answer="a", category="all")
        for number in range(16)
    ]
    candidate = finalist("1.0", -2.0)
    history = History(trial("0.0", np.full(16, -3.0)), [candidate.trial], examples)
    # 16 questions at -2, four at -1.
    assert _combined_estimate(candidate, history) == pytest.approx(-1.8)
