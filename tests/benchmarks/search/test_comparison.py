from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.search.comparison import CachingEvaluator, run_comparison
from benchmarks.search.comparison_table import as_markdown, format_mean
from benchmarks.search.results import read_results, results_of
from offline_search.dataset import Dataset
from offline_search.evaluator import EvaluationJob
from offline_search.ledger import Ledger, SettingsRecord, read_ledger
from offline_search.settings import Settings
from tests.offline_search.replies import valid_replies
from tests.offline_search.synthetic import (
    ScriptedProposer,
    SyntheticEvaluator,
    WaitingProposer,
    dataset,
    list_reply,
)

STRATEGIES = ("tpe", "random")


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    folder = tmp_path / "data"
    folder.mkdir()
    return dataset(folder)


async def test_a_comparison_resumes_and_prints_its_results(data: Dataset, tmp_path: Path) -> None:
    settings = Settings(rounds=2, per_round=3, budgets=(8,))
    evaluator = SyntheticEvaluator(data)
    await run_comparison(tmp_path, STRATEGIES, [0], settings, CachingEvaluator(evaluator), None)
    asked = len(evaluator.jobs)
    await run_comparison(tmp_path, STRATEGIES, [0], settings, CachingEvaluator(evaluator), None)
    assert len(evaluator.jobs) == asked, "nothing is measured again"
    await run_comparison(tmp_path, STRATEGIES, [0, 1], settings, CachingEvaluator(evaluator), None)
    known = read_results(tmp_path)
    winners = {
        name: [one.winner for one in results_of(known, name, range(3)).values() if one.winner]
        for name in STRATEGIES
    }
    assert [len(ended) for ended in winners.values()] == [2, 2]
    text = as_markdown(tmp_path, STRATEGIES, range(3))
    gaps = [
        one.objective - other.objective
        for one, other in zip(winners["tpe"], winners["random"], strict=True)
    ]
    assert f"tpe less random, paired by seed: {format_mean(gaps)}" in text
    assert "| tpe | 2 |" in text


async def test_only_strategies_that_ask_for_lists_get_them(data: Dataset, tmp_path: Path) -> None:
    settings = Settings(
        rounds=1, per_round=3, budgets=(8,), proposer="scripted", proposals_per_reply=3
    )
    arms = {"autoprune": 3, "autoprune+": 3, "autoprune+@none": 1, "tpe": 1}
    proposer = ScriptedProposer([list_reply(0, 3)])
    await run_comparison(tmp_path, list(arms), [0], settings, SyntheticEvaluator(data), proposer)
    for arm, length in arms.items():
        record = read_ledger(tmp_path / f"{arm}-0.jsonl")[0]
        assert isinstance(record, SettingsRecord)
        assert record.settings.proposals_per_reply == length


async def test_concurrent_searches_have_the_same_ledgers(data: Dataset, tmp_path: Path) -> None:
    settings = Settings(rounds=2, per_round=3, budgets=(8,), proposer="m")
    names, seeds, evaluator = ("autoprune", "random"), (0, 1), SyntheticEvaluator(data)
    alone, together = (
        ScriptedProposer(valid_replies(20)),
        WaitingProposer(valid_replies(20), 2 * settings.per_round),
    )
    await run_comparison(tmp_path / "a", names, seeds, settings, evaluator, alone)
    await run_comparison(tmp_path / "b", names, seeds, settings, evaluator, together, concurrency=4)
    for name in names:
        for seed in seeds:
            with (
                Ledger(tmp_path / "a" / f"{name}-{seed}.jsonl") as one,
                Ledger(tmp_path / "b" / f"{name}-{seed}.jsonl") as other,
            ):
                assert one.digest() == other.digest()


async def test_a_model_that_writes_nothing_valid_does_not_stop_other_arms(
    data: Dataset, tmp_path: Path
) -> None:
    settings = Settings(rounds=6, per_round=5, budgets=(8,), proposer="m")
    names, evaluator = ("autoprune", "random"), SyntheticEvaluator(data)
    await run_comparison(tmp_path, names, [0], settings, evaluator, ScriptedProposer(["no"]))
    results = read_results(tmp_path)
    assert results["autoprune-0"].winner is None and results["random-0"].winner is not None
    assert results["autoprune-0"].invalid == results["autoprune-0"].candidates == 25
    lines = as_markdown(tmp_path, names, [0]).splitlines()
    assert "| autoprune | 0 |  |  |  |  | 100 |" in lines
    assert any(line.startswith("| random | 1 |") and line.endswith("| 0 |") for line in lines)


async def test_answers_are_cached_across_searches(data: Dataset) -> None:
    evaluator = SyntheticEvaluator(data)
    remembering = CachingEvaluator(evaluator)
    job = EvaluationJob(None, 0, "search", 0, 4)
    assert await remembering.evaluate(job) == await remembering.evaluate(job)
    assert len(evaluator.jobs) == 1
