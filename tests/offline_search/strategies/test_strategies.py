from __future__ import annotations

import asyncio
import json
import statistics
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from offline_search.candidates import warm_start_states
from offline_search.dataset import Dataset
from offline_search.evaluator import EvaluationJob
from offline_search.history import Answers, Trial
from offline_search.ledger import Ledger, ProposalRecord, ReplyRecord, TrialRecord
from offline_search.replay import replay
from offline_search.search import Search
from offline_search.settings import Settings, Strategy
from offline_search.strategies.language_model import draw_parents
from tests.offline_search.replies import valid_replies
from tests.offline_search.synthetic import (
    ScriptedProposer,
    SyntheticEvaluator,
    ledger_digest,
    records_of_kind,
    run_search,
)
from vllm_autoprune import load_state
from vllm_autoprune.tpdsl.state import PruningState

WARM_STARTS = warm_start_states(Settings(strategy="autoprune+", budgets=(8,)))
SEEDS = range(3)
REPLIES = valid_replies(40)


def search_all_seeds(
    strategy: Strategy, data: Dataset, folder: Path, rounds: int = 6
) -> list[float]:
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
    assert min(plus) > statistics.mean(random)


def test_autoprune_plus_uses_every_origin(data: Dataset, tmp_path: Path) -> None:
    search_all_seeds("autoprune+", data, tmp_path, rounds=4)
    origins: set[str] = set()
    for seed in SEEDS:
        proposed = records_of_kind(tmp_path / f"autoprune+-{seed}", ProposalRecord)
        origins |= {record.origin for record in proposed}
        start = [record.origin for record in proposed if record.round == 1]
        assert start == ["warm start"] * len(WARM_STARTS) + ["random"] * (15 - len(WARM_STARTS))
        names = {record.name for record in proposed}
        for record in proposed:
            assert set(record.parents) <= names
    assert origins - {"random"} == {"warm start", "llm", "tpe", "mutation", "crossover"}


async def test_warm_starts_that_have_no_slot_in_a_round_are_next_in_the_following(
    data: Dataset, tmp_path: Path
) -> None:
    """They fill the first round, then at most half of one."""
    settings = Settings(
        strategy="autoprune+", rounds=4, per_round=3, budgets=(8,), other_bases=("dart", "trim")
    )
    await run_search(tmp_path / "l", settings, SyntheticEvaluator(data, probes=False))
    proposed = records_of_kind(tmp_path / "l", ProposalRecord)
    starts = [one for one in proposed if one.origin == "warm start"]
    counts = Counter(one.round for one in starts)
    slots, expected = 9, warm_start_states(settings)
    rest = len(expected) - slots - slots // 2
    assert [counts[1], counts[2], counts[3]] == [slots, slots // 2, min(slots // 2, rest)]
    assert all(count <= slots // 2 for number, count in counts.items() if number > 1)
    assert {one.digest for one in starts} == {state.digest for state in expected}


def test_a_language_model_gets_less_than_a_third_of_the_slots(
    data: Dataset, tmp_path: Path
) -> None:
    search_all_seeds("autoprune+", data, tmp_path, rounds=4)
    proposed = records_of_kind(tmp_path / "autoprune+-0", ProposalRecord)
    later = [record.origin for record in proposed if record.round > 1]
    assert 0 < later.count("llm") <= 0.3 * len(later)
    assert later.count("tpe") >= later.count("llm")


@pytest.mark.parametrize("strategy", ["autoprune", "tpe"])
async def test_any_strategy_can_race(strategy: Strategy, data: Dataset, tmp_path: Path) -> None:
    settings = Settings(
        strategy=strategy, rounds=3, per_round=4, budgets=(8,), race=True,
        proposer="scripted" if strategy == "autoprune" else "",
    )  # fmt: skip
    await run_search(tmp_path / "l", settings, SyntheticEvaluator(data, probes=False), REPLIES)
    trials = records_of_kind(tmp_path / "l", TrialRecord)
    assert {trial.round for trial in trials if trial.index == 11} >= {1, 2}
    dropped = [trial for trial in trials if trial.status == "dropped"]
    assert dropped and {trial.examples for trial in dropped} <= {3, 12}
    size = len(data.examples("search"))
    assert sum(trial.examples for trial in trials) <= 13 * size


def test_a_race_measures_more_candidates_and_spends_no_more(data: Dataset, tmp_path: Path) -> None:
    search_all_seeds("autoprune+", data, tmp_path, rounds=4)
    trials = records_of_kind(tmp_path / "autoprune+-0", TrialRecord)
    size = len(data.examples("search"))
    # The last round is sized by what its candidates should take: less than one evaluation more.
    assert sum(trial.examples for trial in trials) < 21 * size
    measured = [trial for trial in trials if trial.examples]
    assert len(measured) > 30
    dropped = [trial for trial in trials if trial.status == "dropped"]
    assert {trial.examples for trial in dropped} <= {3, 12}


def test_two_parents_are_drawn_by_rank() -> None:
    population = [
        Trial(
            ProposalRecord(round=1, index=index, origin="x"),
            TrialRecord(round=1, index=index, status="evaluated", objective=-float(index)),
        )
        for index in range(10)
    ]
    second = Counter(
        draw_parents(population, Random(seed))[1].proposal.index for seed in range(2000)
    )
    assert second[1] > 2 * second[8], "the second parent is drawn by rank as well"
    assert all(len({id(p) for p in draw_parents(population, Random(n))}) == 2 for n in range(50))


@pytest.mark.parametrize("strategy", ["random", "tpe"])
def test_seeds_search_differently_and_repeatably(
    strategy: Strategy, data: Dataset, tmp_path: Path
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


@pytest.mark.parametrize("strategy", ["autoprune+", "random", "tpe"])
async def test_base_policies_are_searched_where_several_are_given(
    strategy: Strategy, data: Dataset, tmp_path: Path
) -> None:
    class BestOnDart(SyntheticEvaluator):
        """Another base policy is worth more than anything else."""

        async def evaluate(self, job: EvaluationJob) -> Answers:
            answers = await super().evaluate(job)
            if isinstance(job.candidate, PruningState) and job.candidate.base_policy.name != "dart":
                return Answers(tuple(value - 2 for value in answers.logprob), answers.right)
            return answers

    settings = Settings(strategy=strategy, rounds=4, per_round=4, budgets=(8,))
    for others in ((), ("divprune", "dart")):
        given = settings.model_copy(update={"other_bases": others})
        path = tmp_path / f"{len(others)}"
        winner = await run_search(path, given, BestOnDart(data, probes=False))
        proposed = records_of_kind(path, ProposalRecord)
        states = [load_state(one.state) for one in proposed if one.state is not None]
        names = {state.base_policy.name for state in states}
        assert names == {"cdpruner", *others}
        best = load_state(winner.state or {})
        assert best.base_policy.name == ("dart" if others else "cdpruner")
        if strategy == "autoprune+" and others:
            alone = [load_state(p.state) for p in proposed[1:3] if p.state is not None]
            assert [state.base_policy.name for state in alone] == list(others)
            assert all(state.constraints.selector.bounds(8)[0] == 0 for state in alone)


@pytest.mark.parametrize("strategy", ["autoprune", "autoprune+", "evoprompting-states"])
async def test_a_language_model_chooses_among_base_policies(
    strategy: Strategy, data: Dataset, tmp_path: Path
) -> None:
    bases = ("cdpruner", "divprune", "dart")
    settings = Settings(
        strategy=strategy, rounds=4, per_round=3, budgets=(8,), other_bases=bases[1:],
        proposer="scripted",
    )  # fmt: skip
    example = json.loads(REPLIES[0])
    replies = [json.dumps(example | {"base_policy": {"name": name}}) for name in bases]
    proposer = ScriptedProposer(replies)
    evaluator = SyntheticEvaluator(data, probes=False)
    with Ledger(tmp_path / "l") as ledger:
        await Search(settings, ledger, evaluator, proposer).run()
    prompts = "\n".join(str(messages) for messages in proposer.requests)
    assert all(name in prompts for name in bases)
    proposed = [
        record
        for record in records_of_kind(tmp_path / "l", ProposalRecord)
        if record.origin == "llm"
    ]
    chosen = {load_state(one.state).base_policy.name for one in proposed if one.state is not None}
    assert chosen & set(bases[1:])
    _, before, after = await replay(tmp_path / "l", tmp_path / "again", data)
    assert before == after


def test_a_program_has_no_base_policy() -> None:
    with pytest.raises(ValueError, match="leave others out"):
        Settings(strategy="evoprompting-code", proposer="m", other_bases=("dart",))
