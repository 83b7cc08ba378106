from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.search.confirmation import (
    FILE,
    Confirmed,
    as_markdown,
    confirm,
    format_difference,
    read_confirmation,
)
from benchmarks.search.results import add_result
from offline_search.dataset import Dataset
from offline_search.settings import Settings, Strategy
from tests.offline_search.synthetic import SyntheticEvaluator, dataset, run_search


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    (tmp_path / "data").mkdir()
    return dataset(tmp_path / "data")


async def _search(folder: Path, data: Dataset, strategy: Strategy, seed: int) -> None:
    settings = Settings(strategy=strategy, rounds=1, per_round=3, budgets=(8,), seed=seed)
    await run_search(folder / f"{strategy}-{seed}.jsonl", settings, SyntheticEvaluator(data))
    add_result(folder, strategy, seed)


def test_every_winner_is_measured_once(data: Dataset, tmp_path: Path) -> None:
    for seed in range(2):
        for strategy in ("random", "tpe"):
            asyncio.run(_search(tmp_path, data, strategy, seed))
    evaluator = SyntheticEvaluator(data)
    confirmed = confirm(tmp_path, evaluator)
    assert set(confirmed) == {"random-0", "random-1", "tpe-0", "tpe-1"}
    jobs = len(evaluator.jobs)
    assert confirm(tmp_path, evaluator) == confirmed == read_confirmation(tmp_path)
    assert len(evaluator.jobs) == jobs and {job.split for job in evaluator.jobs} == {"test"}
    text = as_markdown(tmp_path, ["random", "tpe"], range(2))
    gap = sum(confirmed[f"random-{n}"].objective - confirmed[f"tpe-{n}"].objective for n in (0, 1))
    assert f"{gap / 2:.2f} ±" in text and "24 questions" in text
    assert (tmp_path / FILE).exists()


def test_intervals_are_over_seeds_and_questions() -> None:
    def measured(*blocks: float) -> Confirmed:
        mean = sum(blocks) / len(blocks)
        return Confirmed(
            questions=2, evaluator="e", digest="d", objective=mean, accuracy=0.0, blocks=blocks
        )

    base = measured(0.0, 0.0)
    assert format_difference([(measured(1.0, 3.0), base)]) == "2.00 ± 12.71"
    both = [(measured(1.0, 3.0), base), (measured(2.0, 2.0), base)]
    assert format_difference(both) == "2.00 ± 6.36", "the seeds agree in their means"
