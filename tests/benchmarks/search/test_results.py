from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.search.confirmation import confirm
from benchmarks.search.results import (
    CURVE_SHARES,
    FILE,
    Winner,
    add_result,
    has_ended,
    read_results,
    require_model,
    results_of,
)
from offline_search.components import SelectionProgram
from offline_search.dataset import Dataset
from offline_search.ledger import TrialRecord, read_ledger
from offline_search.settings import Settings
from tests.offline_search.synthetic import SyntheticEvaluator, dataset, run_search
from vllm_autoprune.errors import SearchError


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    (tmp_path / "data").mkdir()
    return dataset(tmp_path / "data")


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
