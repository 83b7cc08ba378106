from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import pytest

from offline_search.examples import Dataset
from offline_search.ledger import Ledger, read
from offline_search.records import Proposed, Tried
from offline_search.search import Search
from offline_search.settings import Settings
from tests.offline_search.replies import sound
from tests.offline_search.synthetic import ScriptedProposer, SyntheticEvaluator

SEEDS = range(3)


def found(strategy: str, data: Dataset, folder: Path, rounds: int = 6) -> list[float]:
    """The test objective of each seed, at equal evaluations."""
    values = []
    for seed in SEEDS:
        evaluator = SyntheticEvaluator(data, probes=False)
        settings = Settings(
            strategy=strategy, rounds=rounds, per_round=5, budgets=(8,), seed=seed,
            equal_evaluations=True, evaluator=evaluator.name, proposer="scripted",
        )  # fmt: skip
        proposer = ScriptedProposer(sound(40))
        with Ledger(folder / f"{strategy}-{seed}") as ledger:
            chosen = asyncio.run(Search(settings, ledger, evaluator, proposer).run())
        values.append(chosen.test.objective.value)
    return values


@pytest.mark.slow
def test_what_learns_beats_what_does_not_at_equal_evaluations(
    data: Dataset, tmp_path: Path
) -> None:
    random = found("random", data, tmp_path)
    tpe = found("tpe", data, tmp_path)
    plus = found("autoprune+", data, tmp_path)
    assert statistics.mean(plus) > statistics.mean(tpe) > statistics.mean(random)
    assert min(plus) > max(random)


def test_every_origin_of_autoprune_plus_gets_its_turn(data: Dataset, tmp_path: Path) -> None:
    found("autoprune+", data, tmp_path, rounds=4)
    origins: set[str] = set()
    for seed in SEEDS:
        records = read(tmp_path / f"autoprune+-{seed}")
        proposed = [record for record in records if isinstance(record, Proposed)]
        origins |= {record.origin for record in proposed}
        assert [record.origin for record in proposed[:5]] == ["warm start"] * 5
        names = {record.name for record in proposed}
        for record in proposed:
            assert set(record.parents) <= names
    assert origins == {"warm start", "llm", "wide", "tune", "near", "graft"}


@pytest.mark.parametrize("strategy", ["random", "tpe"])
def test_seeds_search_differently_and_repeatably(
    strategy: str, data: Dataset, tmp_path: Path
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        found(strategy, data, tmp_path / folder, rounds=2)
    digests = []
    for seed in SEEDS:
        with (
            Ledger(tmp_path / "a" / f"{strategy}-{seed}") as one,
            Ledger(tmp_path / "b" / f"{strategy}-{seed}") as other,
        ):
            assert one.digest() == other.digest()
            digests.append(one.digest())
    assert len(set(digests)) == len(digests)


def test_equal_evaluations_are_equal(data: Dataset, tmp_path: Path) -> None:
    found("random", data, tmp_path, rounds=2)
    for seed in SEEDS:
        trials = [r for r in read(tmp_path / f"random-{seed}") if isinstance(r, Tried)]
        spent = sum(trial.examples for trial in trials)
        assert 10 * 24 <= spent < 15 * 24


def test_without_a_proposer_autoprune_plus_asks_nobody(data: Dataset, tmp_path: Path) -> None:
    settings = Settings(strategy="autoprune+", rounds=4, per_round=5, budgets=(8,))
    evaluator, nobody = SyntheticEvaluator(data), ScriptedProposer([])
    settings = settings.model_copy(update={"evaluator": evaluator.name})
    with Ledger(tmp_path / "l") as ledger:
        chosen = asyncio.run(Search(settings, ledger, evaluator, nobody).run())
    assert not nobody.asked and chosen.test.gain.low > 0
