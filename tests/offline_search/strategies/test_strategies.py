from __future__ import annotations

import asyncio
import json
import statistics
from pathlib import Path

import pytest

from offline_search.candidates.search_space import Choice, choices_of_state
from offline_search.dataset import Dataset
from offline_search.ledger.records import ProposalRecord, ReplyRecord, TrialRecord
from offline_search.settings import Settings
from offline_search.strategies.sampling import Suggestion, TpeStudy
from tests.offline_search.replies import valid_replies
from tests.offline_search.synthetic import (
    SyntheticEvaluator,
    ledger_digest,
    records_of_kind,
    run_search,
)
from vllm_autoprune.tpdsl.states.load import load_state

SEEDS = range(3)
REPLIES = valid_replies(40)


def search_all_seeds(strategy: str, data: Dataset, folder: Path, rounds: int = 6) -> list[float]:
    """Test objective of each seed, with the same number of evaluations."""
    values = []
    for seed in SEEDS:
        evaluator = SyntheticEvaluator(data, probes=False)
        settings = Settings(
            strategy=strategy, rounds=rounds, per_round=5, budgets=(8,), seed=seed,
            equal_evaluations=True, proposer="scripted",
        )  # fmt: skip
        path = folder / f"{strategy}-{seed}"
        winner = asyncio.run(run_search(path, settings, evaluator, REPLIES))
        values.append(winner.test.objective.value)
    return values


@pytest.mark.slow
def test_learning_strategies_beat_random_search(data: Dataset, tmp_path: Path) -> None:
    random = search_all_seeds("random", data, tmp_path)
    tpe = search_all_seeds("tpe", data, tmp_path)
    plus = search_all_seeds("autoprune+", data, tmp_path)
    assert statistics.mean(plus) > statistics.mean(tpe) > statistics.mean(random)
    assert min(plus) > max(random)


def test_autoprune_plus_uses_every_origin(data: Dataset, tmp_path: Path) -> None:
    search_all_seeds("autoprune+", data, tmp_path, rounds=4)
    origins: set[str] = set()
    for seed in SEEDS:
        proposed = records_of_kind(tmp_path / f"autoprune+-{seed}", ProposalRecord)
        origins |= {record.origin for record in proposed}
        assert [record.origin for record in proposed[:5]] == ["warm start"] * 5
        names = {record.name for record in proposed}
        for record in proposed:
            assert set(record.parents) <= names
    assert origins == {"warm start", "llm", "wide", "tune", "near", "graft"}


def test_autoprune_plus_explores_whole_states_first(data: Dataset, tmp_path: Path) -> None:
    search_all_seeds("autoprune+", data, tmp_path, rounds=6)
    later: set[str] = set()
    for seed in SEEDS:
        for record in records_of_kind(tmp_path / f"autoprune+-{seed}", ProposalRecord):
            if 1 < record.round <= 3:
                assert record.origin in {"llm", "wide"}
            elif record.round > 3:
                later.add(record.origin)
    assert {"tune", "near", "graft"} & later


def test_whole_state_tpe_ignores_small_changes(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[dict[str, Choice]] = []
    enqueue = TpeStudy.replay

    def record_choices(study: TpeStudy, choices: dict[str, Choice]) -> Suggestion:
        replayed.append(choices)
        return enqueue(study, choices)

    monkeypatch.setattr(TpeStudy, "replay", record_choices)
    search_all_seeds("autoprune+", data, tmp_path, rounds=4)
    known: dict[str, set[str]] = {"whole": set(), "steps": set()}
    for seed in SEEDS:
        for record in records_of_kind(tmp_path / f"autoprune+-{seed}", ProposalRecord):
            if record.state is not None:
                kind = "steps" if record.origin in {"tune", "near", "graft"} else "whole"
                state = load_state(json.dumps(record.state))
                known[kind].add(as_key(choices_of_state(state, 8)))
    # Only choices of whole states name a kernel; TPE within a structure has numbers alone.
    whole = {as_key(choices) for choices in replayed if "similarity_kernel" in choices}
    assert whole & known["whole"]
    assert not whole & (known["steps"] - known["whole"])


def as_key(choices: dict[str, Choice]) -> str:
    return json.dumps(choices, sort_keys=True)


@pytest.mark.parametrize("strategy", ["random", "tpe"])
def test_seeds_search_differently_and_repeatably(
    strategy: str, data: Dataset, tmp_path: Path
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        search_all_seeds(strategy, data, tmp_path / folder, rounds=2)
    digests = []
    for seed in SEEDS:
        one, other = (ledger_digest(tmp_path / name / f"{strategy}-{seed}") for name in ("a", "b"))
        assert one == other
        digests.append(one)
    assert len(set(digests)) == len(digests)


def test_equal_evaluations_spend_the_same_budget(data: Dataset, tmp_path: Path) -> None:
    search_all_seeds("random", data, tmp_path, rounds=2)
    for seed in SEEDS:
        trials = records_of_kind(tmp_path / f"random-{seed}", TrialRecord)
        spent = sum(trial.examples for trial in trials)
        assert 10 * 24 <= spent < 15 * 24


def test_autoprune_plus_runs_without_a_proposer(data: Dataset, tmp_path: Path) -> None:
    settings = Settings(strategy="autoprune+", rounds=4, per_round=5, budgets=(8,))
    winner = asyncio.run(run_search(tmp_path / "l", settings, SyntheticEvaluator(data), []))
    assert not records_of_kind(tmp_path / "l", ReplyRecord) and winner.test.gain.low > 0
