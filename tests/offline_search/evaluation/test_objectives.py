from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from offline_search.dataset import Dataset
from offline_search.evaluation.answers import Answers
from offline_search.evaluation.evaluator import EvaluationJob
from offline_search.evaluation.objectives import dominates, pareto_ranks
from offline_search.ledger import read_ledger
from offline_search.ledger.records import TrialRecord, VerdictRecord, WinnerRecord
from offline_search.replay import replay
from offline_search.report import as_html, as_markdown, read_report
from offline_search.settings import Settings
from tests.offline_search.synthetic import (
    VALID_REPLIES,
    SyntheticEvaluator,
    records_of_kind,
    run_search,
)
from vllm_autoprune.tpdsl.states.state import PruningState

POINTS = st.lists(
    st.fixed_dictionaries({"a": st.integers(0, 4), "b": st.integers(0, 4)}), max_size=12
)


@given(POINTS)
def test_fronts_are_sorted_by_dominance(
    points: list[Mapping[str, float]],
) -> None:
    ranks = pareto_ranks(points)
    for one, rank in zip(points, ranks, strict=True):
        above = [other for other, at in zip(points, ranks, strict=True) if at < rank]
        beside = [other for other, at in zip(points, ranks, strict=True) if at == rank]
        assert not any(dominates(other, one) for other in beside)
        nearest = [other for other, at in zip(points, ranks, strict=True) if at == rank - 1]
        assert rank == 0 or any(dominates(other, one) for other in nearest)
        assert not any(dominates(one, other) for other in above)


def test_equal_points_are_on_one_front() -> None:
    assert pareto_ranks([{"a": 1.0}, {"a": 1.0}, {"a": 0.0}]) == [0, 0, 1]
    assert pareto_ranks([{}, {}]) == [0, 0], "one objective has no front"


class ConflictingTasks(SyntheticEvaluator):
    """A larger quota helps one category and harms the other; the smaller budget scores lower."""

    async def evaluate(self, job: EvaluationJob) -> Answers:
        answers = await super().evaluate(job)
        if not isinstance(job.candidate, PruningState):
            return answers
        pull = 0.1 * (job.candidate.constraints.selector.bounds(8)[0] - 4)
        lost = 0.2 if job.budget == 4 else 0.0
        examples = self.dataset.examples(job.split)[job.start : job.stop]
        values = [
            value - lost + (pull if example.category == "digit" else -pull)
            for value, example in zip(answers.logprob, examples, strict=True)
        ]
        return Answers(tuple(values), answers.right)


async def search(path: Path, data: Dataset, **changes: object) -> WinnerRecord:
    settings = Settings(
        strategy="autoprune+", rounds=4, per_round=4, budgets=(8, 4), proposer="scripted"
    )
    settings = settings.model_copy(update=changes)
    return await run_search(path, settings, ConflictingTasks(data), VALID_REPLIES[:20])


async def test_conflicting_tasks_have_a_pareto_front(data: Dataset, tmp_path: Path) -> None:
    chosen = await search(tmp_path / "l", data, objectives=("quality", "tasks", "budgets"))
    records = records_of_kind(tmp_path / "l", TrialRecord)
    trials = [record for record in records if record.status == "evaluated"]
    assert {frozenset(trial.axes) for trial in trials} == {
        frozenset({"quality", "digit", "colour", "K=8", "K=4"})
    }
    assert not [record for record in records if record.status == "dropped"]
    base, *members = chosen.front
    assert base == "base" and len(members) > 1 and chosen.winner in members
    points = {f"{trial.round}.{trial.index}": trial.axes for trial in trials}
    for name in members:
        assert chosen.front[name].search == points[name]
        assert not any(dominates(other, points[name]) for other in points.values())
        assert chosen.front[name].test.keys() == points[name].keys()
        assert chosen.front[name].test["K=4"] < chosen.front[name].test["K=8"]
    best = {axis: max(points[name][axis] for name in members) for axis in ("digit", "colour")}
    assert best == {axis: max(p[axis] for p in points.values()) for axis in best}
    report = read_report(read_ledger(tmp_path / "l"))
    text, page = as_markdown(report), as_html(report)
    for name in members:
        assert f"| {name} | {chosen.front[name].test['quality']:+.4f}" in text
    assert "Pareto front" in text and "Pareto front" in page


async def test_latency_is_measured_once_and_replayed(data: Dataset, tmp_path: Path) -> None:
    chosen = await search(tmp_path / "l", data, objectives=("quality", "latency"))
    verdicts = [r for r in records_of_kind(tmp_path / "l", VerdictRecord) if r.valid]
    assert verdicts and all(v.latency is not None and v.latency > 0 for v in verdicts)
    measured = {verdict.digest: verdict.latency for verdict in verdicts}
    for member in chosen.front.values():
        assert member.test["latency"] == member.search["latency"] == -(measured[member.digest] or 0)
    _, before, after = await replay(tmp_path / "l", tmp_path / "again", data)
    assert before == after
    assert "selection ms" in as_markdown(read_report(read_ledger(tmp_path / "l")))


async def test_a_single_objective_records_no_objective_vectors(
    data: Dataset, tmp_path: Path
) -> None:
    chosen = await search(tmp_path / "l", data)
    assert chosen.front == {}
    records = read_ledger(tmp_path / "l")
    assert not any(record.axes for record in records if isinstance(record, TrialRecord))
    assert all(record.latency is None for record in records if isinstance(record, VerdictRecord))
    assert "Pareto" not in as_markdown(read_report(records))
    json.dumps(chosen.state)


def test_latency_alone_is_refused() -> None:
    with pytest.raises(ValidationError, match="add quality"):
        Settings(objectives=("latency",))
