"""Results of searches, their winners confirmed, and the tables made of them."""

from __future__ import annotations

import asyncio
import json
import statistics
from pathlib import Path

import pytest

from benchmarks.search.results import (
    CONFIRMATION,
    CURVE_SHARES,
    FILE,
    Confirmed,
    Winner,
    add_result,
    has_ended,
    read_confirmation,
    read_results,
    require_model,
    results_of,
)
from benchmarks.search.study import confirm
from benchmarks.search.tables import (
    format_candidates,
    format_confirmed,
    format_difference,
    format_mean,
)
from offline_search.components import SelectionProgram
from offline_search.dataset import Dataset
from offline_search.ledger import TrialRecord, read_ledger
from offline_search.report import read_report
from offline_search.settings import Settings, Strategy
from tests.offline_search.synthetic import SyntheticEvaluator, dataset, run_search, valid_replies
from vllm_autoprune.errors import SearchError


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    folder = tmp_path / "data"
    folder.mkdir()
    return dataset(folder)


def settings(seed: int) -> Settings:
    return Settings(strategy="random", rounds=2, per_round=3, budgets=(8,), seed=seed)


def test_a_result_has_what_the_ledger_says(data: Dataset, tmp_path: Path) -> None:
    ledger, evaluator = tmp_path / "random-1.jsonl", SyntheticEvaluator(data)
    found = asyncio.run(run_search(ledger, settings(1), evaluator))
    add_result(tmp_path, "random", 1)
    result = read_results(tmp_path)["random-1"]
    records = read_ledger(ledger)
    trials = [one for one in records if isinstance(one, TrialRecord)]
    assert result.candidates == len(trials) == 6 and result.invalid == result.replies == 0
    assert result.answers == sum(one.examples for one in trials)
    best = max(one.objective for one in trials if one.objective is not None)
    assert len(result.curve) == len(CURVE_SHARES) and result.curve[-1] == best
    assert result.curve[0] is None, "a tenth of the answers is less than one candidate"
    assert result.winner is not None
    assert result.winner.objective == found.test.objective.value
    assert result.winner.load().digest == found.digest


def test_results_are_a_line_a_search_and_outlive_their_ledgers(
    data: Dataset, tmp_path: Path
) -> None:
    for seed in (1, 0):
        ledger = tmp_path / f"random-{seed}.jsonl"
        asyncio.run(run_search(ledger, settings(seed), SyntheticEvaluator(data)))
        add_result(tmp_path, "random", seed)
        ledger.unlink()
    lines = (tmp_path / FILE).read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["random-0", "random-1"]
    assert list(results_of(read_results(tmp_path), "random", range(3))) == [0, 1]
    known = read_results(tmp_path)["random-1"].settings
    assert has_ended(tmp_path, "random", 1, known) and not has_ended(tmp_path, "random", 2, known)
    with pytest.raises(SearchError, match="random-1 has other settings"):
        has_ended(tmp_path, "random", 1, known.model_copy(update={"rounds": 3}))


def test_a_winner_may_be_a_program() -> None:
    program = SelectionProgram("def select(features, signals, K):\n    return range(K)\n")
    winner = Winner(
        digest=program.digest, objective=-1.0, gain=0.5, accuracy=0.5, program=program.code
    )
    assert winner.load() == program


def test_an_evaluator_of_another_model_is_refused(data: Dataset, tmp_path: Path) -> None:
    searched = SyntheticEvaluator(data)
    searched.name = "a model, data of the search"
    asyncio.run(run_search(tmp_path / "random-1.jsonl", settings(1), searched))
    add_result(tmp_path, "random", 1)
    result = read_results(tmp_path)["random-1"]
    require_model(result, "a model, data of the confirmation")
    with pytest.raises(SearchError, match="random-1 was measured on a model, not on another model"):
        require_model(result, "another model, data of the search")
    searched.name = "another model, data of the search"
    with pytest.raises(SearchError, match="not on another model"):
        confirm(tmp_path, searched)


def test_candidates_are_counted_by_search_and_by_proposer(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = dataset(tmp_path / "data")
    paths = [tmp_path / f"autoprune-{seed}.jsonl" for seed in range(2)]
    for seed, path in enumerate(paths):
        settings = Settings(
            strategy="autoprune", rounds=2, per_round=3, budgets=(8,), seed=seed, proposer="m"
        )
        replies = [*valid_replies(5), "no proposal"]
        asyncio.run(run_search(path, settings, SyntheticEvaluator(data), replies))
    text = format_candidates(paths)
    rows = [row for path in paths for row in read_report(read_ledger(path)).rows]
    valid = sum(row.result.status not in ("invalid", "unsafe") for row in rows)
    scores = [row.objective for row in rows if row.objective is not None]
    line = next(line for line in text.splitlines() if line.startswith("| m |"))
    expected = ["m", "2", "12", str(valid), str(len(scores)), f"{max(scores):.3f}",
                f"{statistics.mean(scores):.3f}", f"{min(scores):.3f}",
                f"{statistics.stdev(scores):.3f}"]  # fmt: skip
    assert [cell.strip() for cell in line.strip("|").split("|")] == expected
    assert 0 < valid < 12 and text.count("| autoprune-") == 2


@pytest.mark.parametrize(("count", "quantile"), [(5, 2.776), (10, 2.262), (11, 2.228), (24, 2.069)])
def test_mean_has_a_student_t_interval(count: int, quantile: float) -> None:
    values = [float(value) for value in range(count)]
    half = quantile * statistics.stdev(values) / count**0.5
    mean, width = format_mean(values, 2).split(" ± ")
    assert float(mean) == pytest.approx((count - 1) / 2, abs=0.01)
    assert float(width) == pytest.approx(half, abs=0.01)


def test_mean_of_one_value_has_no_interval() -> None:
    assert format_mean([2.0]) == "2.0000"


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
    text = format_confirmed(tmp_path, ["random", "tpe"], range(2))
    gap = sum(confirmed[f"random-{n}"].objective - confirmed[f"tpe-{n}"].objective for n in (0, 1))
    assert f"{gap / 2:.2f} ±" in text and "24 questions" in text
    assert (tmp_path / CONFIRMATION).exists()


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
