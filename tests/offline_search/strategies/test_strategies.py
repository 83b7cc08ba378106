from __future__ import annotations

import asyncio
import json
import statistics
from pathlib import Path

import pytest

from offline_search.candidates.search_space import Choice, choices_of_state
from offline_search.dataset import Dataset
from offline_search.ledger import Ledger, read_ledger
from offline_search.ledger.records import ProposalRecord, TrialRecord
from offline_search.search import Search
from offline_search.settings import Settings
from offline_search.strategies.sampling import Suggestion, TpeStudy
from tests.offline_search.replies import valid_replies
from tests.offline_search.synthetic import ScriptedProposer, SyntheticEvaluator
from vllm_autoprune.tpdsl.states.load import load_state

SEEDS = range(3)


def search_all_seeds(strategy: str, data: Dataset, folder: Path, rounds: int = 6) -> list[float]:
    """Test objective of each seed, with the same number of evaluations."""
    values = []
    for seed in SEEDS:
        evaluator = SyntheticEvaluator(data, probes=False)
        settings = Settings(
            strategy=strategy, rounds=rounds, per_round=5, budgets=(8,), seed=seed,
            equal_evaluations=True, evaluator=evaluator.name, proposer="scripted",
        )  # fmt: skip
        proposer = ScriptedProposer(valid_replies(40))
        with Ledger(folder / f"{strategy}-{seed}") as ledger:
            chosen = asyncio.run(Search(settings, ledger, evaluator, proposer).run())
        values.append(chosen.test.objective.value)
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
        records = read_ledger(tmp_path / f"autoprune+-{seed}")
        proposed = [record for record in records if isinstance(record, ProposalRecord)]
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
        for record in read_ledger(tmp_path / f"autoprune+-{seed}"):
            if isinstance(record, ProposalRecord) and 1 < record.round <= 3:
                assert record.origin in {"llm", "wide"}
            elif isinstance(record, ProposalRecord) and record.round > 3:
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
        for record in read_ledger(tmp_path / f"autoprune+-{seed}"):
            if isinstance(record, ProposalRecord) and record.state is not None:
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
        with (
            Ledger(tmp_path / "a" / f"{strategy}-{seed}") as one,
            Ledger(tmp_path / "b" / f"{strategy}-{seed}") as other,
        ):
            assert one.digest() == other.digest()
            digests.append(one.digest())
    assert len(set(digests)) == len(digests)


def test_equal_evaluations_spend_the_same_budget(data: Dataset, tmp_path: Path) -> None:
    search_all_seeds("random", data, tmp_path, rounds=2)
    for seed in SEEDS:
        trials = [r for r in read_ledger(tmp_path / f"random-{seed}") if isinstance(r, TrialRecord)]
        spent = sum(trial.examples for trial in trials)
        assert 10 * 24 <= spent < 15 * 24


def test_autoprune_plus_runs_without_a_proposer(data: Dataset, tmp_path: Path) -> None:
    settings = Settings(strategy="autoprune+", rounds=4, per_round=5, budgets=(8,))
    evaluator, proposer = SyntheticEvaluator(data), ScriptedProposer([])
    settings = settings.model_copy(update={"evaluator": evaluator.name})
    with Ledger(tmp_path / "l") as ledger:
        chosen = asyncio.run(Search(settings, ledger, evaluator, proposer).run())
    assert not proposer.requests and chosen.test.gain.low > 0
