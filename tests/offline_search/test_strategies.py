from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest

from offline_search.candidates import PROPOSALS, PURPOSES, warm_start_states
from offline_search.components import JsonObject, SelectionProgram
from offline_search.dataset import Dataset
from offline_search.evaluator import EvaluationJob
from offline_search.history import Answers, History, Trial
from offline_search.ledger import (
    Ledger,
    ProgramRecord,
    ProposalRecord,
    ReplyRecord,
    SummaryRecord,
    TrialRecord,
    VerdictRecord,
    read_ledger,
)
from offline_search.programs import run_program
from offline_search.prompt import INITIAL_PROGRAM, Messages, extract_program
from offline_search.proposer import Reply
from offline_search.search import Search
from offline_search.settings import Settings, Strategy
from offline_search.strategies import STRATEGIES
from offline_search.strategies.language_model import draw_parents
from offline_search.strategies.openevolve import _apply_change, _build_database
from tests.offline_search.synthetic import (
    HOSTILE,
    REPLIES_OF,
    VALID_REPLIES,
    ScriptedProposer,
    SyntheticEvaluator,
    change,
    ledger_digest,
    list_reply,
    records_of_kind,
    run_search,
    valid_replies,
)
from vllm_autoprune import load_state
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.tpdsl.state import PruningState

WARM_STARTS = warm_start_states(Settings(strategy="autoprune+", budgets=(8,)))
SEEDS = range(3)
STATES = valid_replies(40)


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
        winner = asyncio.run(run_search(path, settings, evaluator, STATES))
        values.append(winner.test.objective.value)
    return values


@pytest.mark.slow
def test_learning_strategies_beat_random_search(data: Dataset, tmp_path: Path) -> None:
    random = search_all_seeds("random", data, tmp_path)
    tpe = search_all_seeds("tpe", data, tmp_path)
    plus = search_all_seeds("autoprune+", data, tmp_path)
    assert statistics.mean(plus) > statistics.mean(tpe) > statistics.mean(random)
    assert min(plus) > statistics.mean(random)


def test_autoprune_plus_races_candidates_of_every_origin(data: Dataset, tmp_path: Path) -> None:
    search_all_seeds("autoprune+", data, tmp_path, rounds=4)
    origins: set[str] = set()
    for seed in SEEDS:
        proposed = records_of_kind(tmp_path / f"autoprune+-{seed}", ProposalRecord)
        origins |= {record.origin for record in proposed}
        start = [record.origin for record in proposed if record.round == 1]
        assert start == ["warm start"] * len(WARM_STARTS) + ["random"] * (15 - len(WARM_STARTS))
        names = {record.name for record in proposed}
        assert all(set(record.parents) <= names for record in proposed)
    assert origins - {"random"} == {"warm start", "llm", "tpe", "mutation", "crossover"}
    proposed = records_of_kind(tmp_path / "autoprune+-0", ProposalRecord)
    later = [record.origin for record in proposed if record.round > 1]
    assert 0 < later.count("llm") <= 0.3 * len(later), "a model has three slots in ten at most"
    assert later.count("tpe") >= later.count("llm")
    trials = records_of_kind(tmp_path / "autoprune+-0", TrialRecord)
    # The last round is sized by what its candidates should take: less than one evaluation more.
    assert sum(trial.examples for trial in trials) < 21 * len(data.examples("search"))
    assert len([trial for trial in trials if trial.examples]) > 30
    dropped = [trial for trial in trials if trial.status == "dropped"]
    assert {trial.examples for trial in dropped} <= {3, 12}


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


@pytest.mark.parametrize("strategy", ["autoprune", "tpe"])
async def test_any_strategy_can_race(strategy: Strategy, data: Dataset, tmp_path: Path) -> None:
    settings = Settings(
        strategy=strategy, rounds=3, per_round=4, budgets=(8,), race=True,
        proposer="scripted" if strategy == "autoprune" else "",
    )  # fmt: skip
    await run_search(tmp_path / "l", settings, SyntheticEvaluator(data, probes=False), STATES)
    trials = records_of_kind(tmp_path / "l", TrialRecord)
    assert {trial.round for trial in trials if trial.index == 11} >= {1, 2}
    dropped = [trial for trial in trials if trial.status == "dropped"]
    assert dropped and {trial.examples for trial in dropped} <= {3, 12}
    size = len(data.examples("search"))
    assert sum(trial.examples for trial in trials) <= 13 * size


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
        trials = records_of_kind(tmp_path / "a" / f"{strategy}-{seed}", TrialRecord)
        assert 10 * 24 <= sum(trial.examples for trial in trials) < 15 * 24, "equal evaluations"
    assert len(set(digests)) == len(digests)


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
    example = json.loads(STATES[0])
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


LISTS = Settings(
    strategy="autoprune", rounds=3, per_round=5, budgets=(8,), proposer="scripted",
    proposals_per_reply=5,
)  # fmt: skip


async def search_lists(
    path: Path, settings: Settings, data: Dataset, replies: list[str | None]
) -> ScriptedProposer:
    proposer = ScriptedProposer(replies)
    evaluator = SyntheticEvaluator(data)
    settings = settings.model_copy(update={"evaluator": evaluator.name})
    with Ledger(path) as ledger:
        await Search(settings, ledger, evaluator, proposer).run()
    return proposer


async def test_one_request_of_a_round_brings_all_its_candidates(
    data: Dataset, tmp_path: Path
) -> None:
    proposer = await search_lists(tmp_path / "l", LISTS, data, [list_reply(n, 5) for n in range(7)])
    assert len(proposer.requests) == len(records_of_kind(tmp_path / "l", ReplyRecord)) == 3
    proposed = records_of_kind(tmp_path / "l", ProposalRecord)
    assert len(proposed) == 15 and not any(one.problems for one in proposed)
    assert all(one.hypothesis is not None and one.hypothesis.text for one in proposed)
    first, second, _ = (messages[1]["content"] for messages in proposer.requests)
    assert "in order: explore, explore, explore, explore, explore." in first
    assert f"in order: {', '.join(PURPOSES)}." in second
    summaries = [one.text for one in records_of_kind(tmp_path / "l", SummaryRecord)]
    for number, text in enumerate(summaries, 1):
        lines = [line for line in text.splitlines() if f"- {number}." in line and "=>" in line]
        assert len(lines) == 5 and all(": List " in line for line in lines)
    assert summaries[0] in second


async def test_a_race_asks_for_as_many_lists_as_it_needs(data: Dataset, tmp_path: Path) -> None:
    race = LISTS.model_copy(update={"race": True, "rounds": 1, "per_round": 4})
    proposer = await search_lists(
        tmp_path / "l", race, data, [list_reply(n, 5) for n in range(2, 9)]
    )
    asked = [messages[1]["content"].splitlines()[-1] for messages in proposer.requests]
    ranges = ["candidates 1 to 5", "candidates 6 to 10", "candidates 11 to 12"]
    assert [line.partition(" of ")[0] for line in asked[:3]] == [f"Propose {one}" for one in ranges]
    trials = records_of_kind(tmp_path / "l", TrialRecord)
    assert [trial.index for trial in trials if trial.round == 1] == list(range(12))
    assert any(trial.status == "dropped" for trial in trials)


async def test_invalid_proposals_of_a_list_are_repaired_together(
    data: Dataset, tmp_path: Path
) -> None:
    once = LISTS.model_copy(update={"rounds": 1})
    broken = json.loads(list_reply(0, 5))[PROPOSALS]
    broken[1]["scoring"] = {}
    del broken[4]

    class Repairing(ScriptedProposer):
        async def reply(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
            self.requests.append(messages)
            if len(self.requests) == 1:
                return Reply(json.dumps({PROPOSALS: broken}))
            assert schema is not None and '"minItems": 2, "maxItems": 2' in json.dumps(schema)
            return Reply(list_reply(20, 2))

    proposer = Repairing([])
    with Ledger(tmp_path / "l") as ledger:
        await Search(once, ledger, SyntheticEvaluator(data), proposer).run()
    assert len(proposer.requests) == 2
    correction = proposer.requests[1][-1]["content"]
    assert "- proposal 2: " in correction and "- proposal 5: " in correction
    assert "- proposal 1" not in correction and "list of these 2 proposals" in correction
    proposed = records_of_kind(tmp_path / "l", ProposalRecord)
    texts = [one.hypothesis.text for one in proposed if one.hypothesis is not None]
    assert texts == ["List 0.", "List 20.", "List 0.", "List 0.", "List 20."]
    assert not any(one.problems for one in proposed)


async def test_a_proposal_that_repeats_another_of_its_list_is_measured_once(
    data: Dataset, tmp_path: Path
) -> None:
    one = json.loads(list_reply(3, 1))[PROPOSALS]
    once = LISTS.model_copy(update={"rounds": 1})
    await search_lists(tmp_path / "l", once, data, [json.dumps({PROPOSALS: one * 5})])
    trials = records_of_kind(tmp_path / "l", TrialRecord)
    assert [trial.status for trial in trials] == ["evaluated", *["same"] * 4]
    assert {trial.same_as for trial in trials[1:]} == {"1.0"}


@pytest.mark.parametrize("strategy", ["autoprune", "autoprune+"])
async def test_a_model_that_writes_no_lists_ends_no_search(
    strategy: Strategy, data: Dataset, tmp_path: Path
) -> None:
    class InOrder(ScriptedProposer):
        async def reply(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
            self.requests.append(messages)
            text = self.replies[(len(self.requests) - 1) % len(self.replies)]
            return Reply(text, "" if text else "the endpoint is down")

    settings = LISTS.model_copy(update={"strategy": strategy, "rounds": 4})
    proposer = InOrder([VALID_REPLIES[0], *HOSTILE.values(), None])
    with Ledger(tmp_path / "l") as ledger:
        await Search(settings, ledger, SyntheticEvaluator(data), proposer).run()
    proposed = records_of_kind(tmp_path / "l", ProposalRecord)
    model = [one for one in proposed if one.origin == "llm"]
    assert model and all(one.problems or one.state is not None for one in model)
    assert sum(one.state is not None for one in model) == 1


async def test_a_model_that_writes_lists_proposes_in_the_first_round_of_autoprune_plus(
    data: Dataset, tmp_path: Path
) -> None:
    for length, wanted in ((1, 0), (5, 4)):
        settings = LISTS.model_copy(
            update={"strategy": "autoprune+", "rounds": 1, "proposals_per_reply": length}
        )
        path = tmp_path / str(length)
        await search_lists(path, settings, data, [list_reply(n, 4) for n in range(7)])
        proposed = records_of_kind(path, ProposalRecord)
        first = [one.origin for one in proposed if one.round == 1]
        assert len(first) == 15 and first.count("llm") == wanted
        assert first.count("warm start") > 4


OPENEVOLVE = Settings(
    strategy="openevolve-states", rounds=3, per_round=3, budgets=(8,), proposer="scripted"
)


async def evolve(path: Path, data: Dataset) -> tuple[ScriptedProposer, str]:
    evaluator = SyntheticEvaluator(data)
    proposer = ScriptedProposer(REPLIES_OF["openevolve-states"])
    settings = OPENEVOLVE.model_copy(update={"evaluator": evaluator.name})
    with Ledger(path) as ledger:
        await Search(settings, ledger, evaluator, proposer).run()
        return proposer, ledger.digest()


async def test_programs_are_evolved_and_evaluated(data: Dataset, tmp_path: Path) -> None:
    before = random.getstate()
    proposer, _ = await evolve(tmp_path / "l", data)
    assert random.getstate() == before, "the state of the global generator is restored"
    records = read_ledger(tmp_path / "l")
    proposed = [record for record in records if isinstance(record, ProposalRecord)]
    first, *children = proposed
    assert first.origin == "initial" and json.loads((await run_program(first.program, 8)).text)
    names = {one.name for one in proposed}
    assert all(child.origin == "openevolve" and set(child.parents) <= names for child in children)
    programs = {f"{r.round}.{r.index}": r for r in records if isinstance(r, ProgramRecord)}
    results = {f"{r.round}.{r.index}": r for r in records if isinstance(r, TrialRecord)}
    for child in children:
        if child.state is None:
            assert results[child.name].status == "invalid"
        else:
            scoring = json.loads(programs[child.name].output)["scoring"]["signals"]
            signals = child.state["scoring"]["signals"]  # type: ignore[index, call-overload]
            assert [s["atom"] for s in signals] == [s["atom"] for s in scoring]  # type: ignore[union-attr, call-overload, index]
    assert any(child.state is not None for child in children)
    asked = [messages[1]["content"] for messages in proposer.requests]
    assert any("def policy(budget)" in text and "combined_score" in text for text in asked)
    assert all("quality_topk_selector" in messages[0]["content"] for messages in proposer.requests)


async def test_every_slot_of_every_round_is_a_candidate_on_one_of_five_islands(
    data: Dataset, tmp_path: Path
) -> None:
    await evolve(tmp_path / "l", data)
    proposed = [r for r in read_ledger(tmp_path / "l") if isinstance(r, ProposalRecord)]
    assert len(proposed) == OPENEVOLVE.total_candidates
    trials = [
        Trial(one, TrialRecord(round=one.round, index=one.index, status="invalid"))
        for one in proposed
    ]
    base = TrialRecord(round=0, index=0, status="evaluated", objective=-1.0)
    database = _build_database(History(base, np.zeros(1), trials), [])
    assert len(database.islands) == 5
    programs = {one.name: number for number, one in enumerate(proposed) if one.program}
    for number, island in enumerate(database.islands):
        assert all(programs[name] % 5 == number for name in island if name in programs)


def test_a_reply_that_leaves_its_parent_unchanged_is_no_candidate() -> None:
    parent = "def policy(budget):\n    return {}\n"
    assert _apply_change(parent, change("return 1")).startswith("def policy(budget):\n    return 1")
    same = "<<<<<<< SEARCH\n    return {}\n=======\n    return {}\n>>>>>>> REPLACE\n"
    for reply in (same, "```python\n" + parent + "```", change("x").replace("budget", "b")):
        with pytest.raises(ValueError, match=r"SEARCH|does not change"):
            _apply_change(parent, reply)


def test_parents_do_not_depend_on_hash_seeds(data: Dataset, tmp_path: Path) -> None:
    digests = set()
    for seed in ("1", "2"):
        process = subprocess.run(
            [sys.executable, "-m", "tests.offline_search.test_strategies",
             str(data.folder), str(tmp_path / seed)],
            capture_output=True, text=True, timeout=120, cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.returncode == 0, process.stderr[-2000:]
        digests.add(process.stdout)
    assert len(digests) == 1


def test_a_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openevolve.database", None)
    with pytest.raises(ConfigError, match="search-openevolve"):
        STRATEGIES["openevolve-states"](OPENEVOLVE)


@pytest.mark.parametrize("strategy", ["evoprompting-code", "openevolve-code"])
async def test_programs_are_candidates(strategy: Strategy, data: Dataset, tmp_path: Path) -> None:
    settings = Settings(
        strategy=strategy, rounds=4, per_round=4, budgets=(8,), proposer="scripted"
    )  # fmt: skip
    replies = REPLIES_OF[strategy]
    winner = await run_search(tmp_path / "l", settings, SyntheticEvaluator(data), replies)
    assert winner.state is None and SelectionProgram(winner.program).digest == winner.digest
    proposals = records_of_kind(tmp_path / "l", ProposalRecord)
    assert all(one.state is None for one in proposals)
    assert winner.program in {one.program for one in proposals}
    statuses = [trial.status for trial in records_of_kind(tmp_path / "l", TrialRecord)]
    assert {"evaluated", "unsafe", "invalid"} <= set(statuses)
    problems = " ".join(
        problem
        for one in records_of_kind(tmp_path / "l", VerdictRecord)
        for problem in one.problems
    )
    assert "1 different indices" in problems or "Permission" in problems


def test_a_program_is_taken_from_its_fence() -> None:
    assert extract_program(f"Sure:\n```python\n{INITIAL_PROGRAM}```\nbye") == INITIAL_PROGRAM
    assert extract_program(f"```\nx = 1\n```\n```py\n{INITIAL_PROGRAM}") == INITIAL_PROGRAM
    assert extract_program(INITIAL_PROGRAM) == INITIAL_PROGRAM
    for reply in ("", "```python\nx = 1\n```", "{}"):
        with pytest.raises(ValueError, match="defines no function select"):
            extract_program(reply)


if __name__ == "__main__":
    import asyncio

    from offline_search.dataset import read_dataset

    folder, ledger = map(Path, sys.argv[1:])
    print(asyncio.run(evolve(ledger, read_dataset(folder)))[1])
