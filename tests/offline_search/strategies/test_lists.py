from __future__ import annotations

import json
from pathlib import Path

import pytest

from offline_search.candidates import PROPOSALS, PURPOSES
from offline_search.components import JsonObject
from offline_search.dataset import Dataset
from offline_search.ledger import Ledger, ProposalRecord, ReplyRecord, SummaryRecord, TrialRecord
from offline_search.prompt import Messages
from offline_search.proposer import Reply
from offline_search.replay import replay
from offline_search.search import Search
from offline_search.settings import Settings, Strategy
from tests.offline_search.replies import HOSTILE
from tests.offline_search.synthetic import (
    VALID_REPLIES,
    ScriptedProposer,
    SyntheticEvaluator,
    ledger_digest,
    list_reply,
    records_of_kind,
    run_search,
)

SETTINGS = Settings(
    strategy="autoprune", rounds=3, per_round=5, budgets=(8,), proposer="scripted",
    proposals_per_reply=5,
)  # fmt: skip


async def search(
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
    proposer = await search(tmp_path / "l", SETTINGS, data, [list_reply(n, 5) for n in range(7)])
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
    race = SETTINGS.model_copy(update={"race": True, "rounds": 1, "per_round": 4})
    proposer = await search(tmp_path / "l", race, data, [list_reply(n, 5) for n in range(2, 9)])
    asked = [messages[1]["content"].splitlines()[-1] for messages in proposer.requests]
    ranges = ["candidates 1 to 5", "candidates 6 to 10", "candidates 11 to 12"]
    assert [line.partition(" of ")[0] for line in asked[:3]] == [f"Propose {one}" for one in ranges]
    trials = records_of_kind(tmp_path / "l", TrialRecord)
    assert [trial.index for trial in trials if trial.round == 1] == list(range(12))
    assert any(trial.status == "dropped" for trial in trials)


async def test_invalid_proposals_of_a_list_are_repaired_together(
    data: Dataset, tmp_path: Path
) -> None:
    once = SETTINGS.model_copy(update={"rounds": 1})
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
    once = SETTINGS.model_copy(update={"rounds": 1})
    await search(tmp_path / "l", once, data, [json.dumps({PROPOSALS: one * 5})])
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

    settings = SETTINGS.model_copy(update={"strategy": strategy, "rounds": 4})
    proposer = InOrder([VALID_REPLIES[0], *HOSTILE.values(), None])
    with Ledger(tmp_path / "l") as ledger:
        await Search(settings, ledger, SyntheticEvaluator(data), proposer).run()
    proposed = records_of_kind(tmp_path / "l", ProposalRecord)
    model = [one for one in proposed if one.origin == "llm"]
    assert model and all(one.problems or one.state is not None for one in model)
    assert sum(one.state is not None for one in model) == 1


@pytest.mark.parametrize("strategy", ["autoprune", "autoprune+"])
async def test_searches_with_lists_resume_and_replay(
    strategy: Strategy, data: Dataset, tmp_path: Path
) -> None:
    settings = SETTINGS.model_copy(update={"strategy": strategy, "rounds": 2, "per_round": 4})
    replies = [*(list_reply(n, 4) for n in range(5)), list_reply(9, 2), HOSTILE["prose"], None]
    whole = tmp_path / "whole"
    await run_search(whole, settings, SyntheticEvaluator(data), replies)
    lines = whole.read_bytes().splitlines(keepends=True)
    for end in range(0, len(lines), max(1, len(lines) // 3)):
        part = tmp_path / f"part-{end}"
        part.write_bytes(b"".join(lines[:end]))
        await run_search(part, settings, SyntheticEvaluator(data), replies)
        assert ledger_digest(part) == ledger_digest(whole)
    _, before, after = await replay(whole, tmp_path / "replayed", data)
    assert before == after


async def test_a_model_that_writes_lists_proposes_in_the_first_round_of_autoprune_plus(
    data: Dataset, tmp_path: Path
) -> None:
    for length, wanted in ((1, 0), (5, 4)):
        settings = SETTINGS.model_copy(
            update={"strategy": "autoprune+", "rounds": 1, "proposals_per_reply": length}
        )
        path = tmp_path / str(length)
        await search(path, settings, data, [list_reply(n, 4) for n in range(7)])
        proposed = records_of_kind(path, ProposalRecord)
        first = [one.origin for one in proposed if one.round == 1]
        assert len(first) == 15 and first.count("llm") == wanted
        assert first.count("warm start") > 4
