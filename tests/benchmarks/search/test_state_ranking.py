from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.search.state_ranking import rank_states
from offline_search.dataset import Dataset
from offline_search.settings import Settings
from offline_search.strategies.start_states import base_state, paper_state
from tests.offline_search.synthetic import SyntheticEvaluator, dataset, score_state

BUDGETS = (4, 8)


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    folder = tmp_path / "data"
    folder.mkdir()
    return dataset(folder)


async def test_the_best_are_measured_on_test_questions(data: Dataset) -> None:
    settings = Settings(budgets=(8,))
    states = {f"q-{quota}": paper_state(settings, quota) for quota in (1, 4, 8)}
    baseline = base_state(settings)
    evaluator, confirming = SyntheticEvaluator(data), SyntheticEvaluator(data)
    text = await rank_states(evaluator, confirming, states, baseline, BUDGETS, count=1)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    best = max(states, key=lambda name: score_state(states[name]))
    assert [row[0] for row in rows][:2] == [baseline.name, best] and len(rows) == 4
    difference, _, width = rows[1][4].partition(" ± ")
    expected = score_state(states[best]) - score_state(baseline)
    assert float(difference) == pytest.approx(expected, abs=float(width)) and float(width) > 0
    assert rows[0][4] == "-" and all(row[2:] == ["", "", ""] for row in rows[2:])
    assert {job.split for job in evaluator.jobs} == {"search", "validation"}
    assert {job.split for job in confirming.jobs} == {"test"}
    measured = {job.candidate.digest for job in confirming.jobs if job.candidate is not None}
    assert measured == {baseline.digest, states[best].digest}
