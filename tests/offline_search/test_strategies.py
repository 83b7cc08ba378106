"""What each strategy proposes, with and without a language model."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from offline_search.candidates import PROPOSALS, PURPOSES, base_state, paper_state
from offline_search.dataset import read_dataset
from offline_search.evaluator import EvaluationJob
from offline_search.history import Answers, History
from offline_search.ledger import ProposalRecord, ReplyRecord, TrialRecord
from offline_search.settings import Settings
from offline_search.strategies import STRATEGIES
from offline_search.strategies.language_model import Round
from offline_search.strategies.openevolve import _apply_change
from offline_search.strategies.sampling import _warm_start_states
from tests.offline_search.synthetic import (
    REPLIES_OF,
    SIZE,
    VALID_REPLIES,
    ScriptedProposer,
    Searches,
    SyntheticEvaluator,
    change,
    list_reply,
    settings_of,
    trial,
)
from tests.tables import parametrize_from_file
from vllm_autoprune import load_state
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.tpdsl.state import PruningState


async def search_blindly(
    search: Searches, strategy: str, seed: int = 0, **changes: Any
) -> float:
    """Test objective of a search without probes, whose evaluations are as many for all seeds."""
    fields = {"per_round": 5, "equal_evaluations": True, **changes}
    winner = await search(
        VALID_REPLIES,
        SyntheticEvaluator(search.data, probes=False),
        f"{strategy}-{seed}",
        strategy=strategy,
        seed=seed,
        **fields,
    )
    return winner.test.objective.value


@pytest.mark.slow
async def test_learning_strategies_beat_random_search(search: Searches) -> None:
    values = {
        strategy: [
            await search_blindly(search, strategy, seed, rounds=6) for seed in range(3)
        ]
        for strategy in ("random", "tpe", "autoprune+")
    }
    means = {strategy: statistics.mean(scores) for strategy, scores in values.items()}
    assert means["autoprune+"] > means["tpe"] > means["random"]
    assert min(values["autoprune+"]) > means["random"]


async def test_autoprune_plus_races_candidates_of_every_origin(
    search: Searches,
) -> None:
    await search_blindly(search, "autoprune+", rounds=4)
    proposed = search.records(ProposalRecord)
    trials = search.records(TrialRecord)
    starts = len(_warm_start_states(settings_of(strategy="autoprune+")))
    origins = [record.origin for record in proposed if record.round == 1]
    assert origins == ["warm start"] * starts + ["random"] * (15 - starts)
    later = [record.origin for record in proposed if record.round > 1]
    assert {"llm", "tpe", "mutation", "crossover"} <= {*later}
    assert 0 < later.count("llm") <= 0.3 * len(later), (
        "a model has three slots in ten at most"
    )
    assert later.count("tpe") >= later.count("llm")
    names = {record.name for record in proposed}
    assert all(set(record.parents) <= names for record in proposed)
    # The last round is sized by what its candidates should take: less than one evaluation more.
    assert sum(trial.examples for trial in trials) < 21 * SIZE
    assert len([trial for trial in trials if trial.examples]) > 30
    assert {trial.examples for trial in trials if trial.status == "dropped"} <= {3, 12}


async def test_the_only_candidate_is_changed_and_not_mixed_with_itself() -> None:
    settings = settings_of(strategy="autoprune+", proposer="")
    values = np.full(2, -1.0)
    history = History(
        trial("0.0", values - 1, base_state(settings)),
        [trial("1.0", values, paper_state(settings))],
        [Example(image=name, question="?", answer="x", category="c") for name in "ab"],
    )
    strategy = STRATEGIES["autoprune+"](settings)
    client: Any = SimpleNamespace(request=None)  # no slot is the model's
    drafts = await strategy.propose(
        Round(2, 12, history, "", random.Random(0), client, frozenset(), "", "open")
    )
    parents = {draft.parents for draft in drafts if draft.origin == "mutation"}
    assert parents == {("1.0",)}
    assert {draft.origin for draft in drafts} == {"warm start", "tpe", "mutation"}


@pytest.mark.parametrize("strategy", ["autoprune+", "random", "tpe"])
async def test_base_policies_are_searched_where_several_are_offered(
    strategy: str, search: Searches
) -> None:
    def best_on_dart(job: EvaluationJob, answers: Answers) -> Answers:
        """Another base policy is worth more than anything else."""
        if (
            isinstance(job.candidate, PruningState)
            and job.candidate.base_policy.name != "dart"
        ):
            return Answers(tuple(value - 2 for value in answers.logprob), answers.right)
        return answers

    for offered in ((), ("divprune", "dart")):
        winner = await search(
            evaluator=SyntheticEvaluator(search.data, False, best_on_dart),
            strategy=strategy,
            ledger=str(len(offered)),
            rounds=4,
            per_round=4,
            proposer="",
            other_bases=offered,
        )
        states = [
            load_state(each.state or {}) for each in search.records(ProposalRecord)
        ]
        assert {state.base_policy.name for state in states} == {"cdpruner", *offered}
        best = load_state(winner.state or {}).base_policy.name
        assert best == ("dart" if offered else "cdpruner")
    if strategy == "autoprune+":
        assert [state.base_policy.name for state in states[1:3]] == list(offered)
        assert not any(state.constraints.selector.bounds(8)[0] for state in states[1:3])


# ---- lists of proposals ----

LISTS: dict[str, Any] = {"per_round": 5, "proposals_per_reply": 5}


async def test_one_request_of_a_round_brings_all_its_candidates(
    search: Searches,
) -> None:
    await search([list_reply(n, 5) for n in range(7)], **LISTS)
    requests = search.proposer.requests
    assert len(requests) == len(search.records(ReplyRecord)) == 3
    proposed = search.records(ProposalRecord)
    assert len(proposed) == 15 and not any(record.problems for record in proposed)
    assert all(record.hypothesis and record.hypothesis.text for record in proposed)
    prompts = [messages[1]["content"] for messages in requests]
    assert f"in order: {', '.join(['explore'] * 5)}." in prompts[0]
    assert f"in order: {', '.join(PURPOSES)}." in prompts[1]
    assert len([line for line in prompts[1].splitlines() if ": List " in line]) == 5


async def test_invalid_proposals_of_a_list_are_repaired_together(
    search: Searches,
) -> None:
    broken = json.loads(list_reply(0, 5))[PROPOSALS]
    broken[1]["scoring"] = {}
    del broken[4]
    replies = [json.dumps({PROPOSALS: broken}), list_reply(20, 2)]
    await search(ScriptedProposer(replies, in_order=True), **LISTS | {"rounds": 1})
    _, repair = search.proposer.requests
    assert '"minItems": 2, "maxItems": 2' in json.dumps(search.proposer.schemas[1])
    correction = repair[-1]["content"]
    assert "- candidate 1.1: " in correction and "- candidate 1.4: " in correction
    assert "candidate 1.0" not in correction and "with 1.1, 1.4 alone" in correction
    proposed = search.records(ProposalRecord)
    texts = [
        record.hypothesis.text for record in proposed if record.hypothesis is not None
    ]
    assert texts == ["List 0.", "List 20.", "List 0.", "List 0.", "List 20."]
    assert not any(record.problems for record in proposed)


@pytest.mark.parametrize(("length", "count"), [(1, 0), (5, 4)])
async def test_a_model_that_writes_lists_proposes_in_the_first_round_of_autoprune_plus(
    length: int, count: int, search: Searches
) -> None:
    changes = {"strategy": "autoprune+", "rounds": 1, "proposals_per_reply": length}
    await search([list_reply(n, 4) for n in range(7)], **LISTS | changes)
    origins = [
        each.origin for each in search.records(ProposalRecord) if each.round == 1
    ]
    assert len(origins) == 15 and origins.count("llm") == count
    assert origins.count("warm start") > 4


# ---- the two baselines ----


async def test_states_are_evolved_by_diffs(search: Searches) -> None:
    before = random.getstate()
    await search(REPLIES_OF["openevolve"], strategy="openevolve")
    assert random.getstate() == before, "the state of the global generator is restored"
    initial, *children = proposed = search.records(ProposalRecord)
    assert len(proposed) == 9 and initial.origin == "initial" and initial.state
    names = {record.name for record in proposed}
    assert all(
        child.origin == "openevolve" and {*child.parents} <= names for child in children
    )
    evolved = [child.state for child in children if child.state is not None]
    assert evolved and all(child.problems for child in children if child.state is None)
    signals = [
        json.loads(text)["scoring"]["signals"][0]["atom"] for text in VALID_REPLIES[:6]
    ]
    for state in map(load_state, evolved):
        assert state.scoring.signals[0].atom in signals, "changed by the reply"
        assert state.reassembly == load_state(initial.state).reassembly, (
            "and by nothing else"
        )
    system, user = (
        "\n".join(m[place]["content"] for m in search.proposer.requests)
        for place in (0, 1)
    )
    assert '"scoring": {' in user and "combined_score" in user
    assert "quality_topk_selector" in system


async def test_candidates_are_assigned_to_islands_in_turn_over_all_rounds(
    search: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    from openevolve.config import DatabaseConfig
    from openevolve.database import ProgramDatabase

    sampled: list[int] = []
    sample = ProgramDatabase.sample_from_island

    def record_island(database: ProgramDatabase, island: int, count: int) -> Any:
        sampled.append(island)
        return sample(database, island, count)

    monkeypatch.setattr(ProgramDatabase, "sample_from_island", record_island)
    await search(REPLIES_OF["openevolve"], strategy="openevolve")
    islands = DatabaseConfig().num_islands
    assert sampled == [number % islands for number in range(1, 9)]


def test_a_reply_that_leaves_its_parent_unchanged_is_no_candidate() -> None:
    parent = json.dumps(json.loads(VALID_REPLIES[0]), indent=1)
    changed = json.loads(_apply_change(parent, change(VALID_REPLIES[1])))
    assert changed["scoring"] == json.loads(VALID_REPLIES[1])["scoring"]
    equal = '<<<<<<< SEARCH\n "scoring": {\n=======\n "scoring": {\n>>>>>>> REPLACE\n'
    for reply in (equal, parent, change(VALID_REPLIES[1]).replace("scoring", "scores")):
        with pytest.raises(ValueError, match=r"SEARCH|does not change"):
            _apply_change(parent, reply)


def test_parents_do_not_depend_on_hash_seeds(search: Searches, tmp_path: Path) -> None:
    digests = set()
    for seed in ("1", "2"):
        (tmp_path / seed).mkdir()
        process = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.offline_search.test_strategies",
                str(search.data.folder),
                str(tmp_path / seed),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
        )
        assert process.returncode == 0, process.stderr[-2000:]
        digests.add(process.stdout)
    assert len(digests) == 1


@parametrize_from_file("package", "strategy", "extra")
def test_a_missing_package_is_an_error(
    package: str, strategy: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=extra):
        STRATEGIES[strategy](Settings())


if __name__ == "__main__":
    folder, ledgers = map(Path, sys.argv[1:])
    search = Searches(read_dataset(folder), ledgers)
    asyncio.run(search(REPLIES_OF["openevolve"], strategy="openevolve"))
    print(search.digest())
