from __future__ import annotations

import json
from pathlib import Path

import pytest

from offline_search.candidates.components import compact_json
from offline_search.candidates.proposal import Draft, assemble_state
from offline_search.dataset import Dataset
from offline_search.evaluation.evaluation_round import RoundEvaluator
from offline_search.evaluation.evaluator import RecordedEvaluator
from offline_search.ledger import Ledger
from offline_search.ledger.records import ProposalRecord, TrialRecord, WinnerRecord
from offline_search.settings import Settings
from offline_search.strategies.start_states import base_state, paper_state
from tests.offline_search.replies import HOSTILE
from tests.offline_search.synthetic import (
    VALID_REPLIES,
    SyntheticEvaluator,
    records_of_kind,
    run_search,
)
from vllm_autoprune.errors import SearchError


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_replies_are_invalid_proposals_and_the_search_continues(
    name: str, settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"rounds": 2, "per_round": 4})
    replies = [HOSTILE[name], VALID_REPLIES[0], HOSTILE[name], VALID_REPLIES[1], VALID_REPLIES[2]]
    await run_search(tmp_path / "l", settings, SyntheticEvaluator(data), replies)
    trials = records_of_kind(tmp_path / "l", TrialRecord)
    assert len(trials) == 8 and "evaluated" in {trial.status for trial in trials}
    for trial in trials:
        assert trial.status != "invalid" or trial.reason
    assert (tmp_path / "l").stat().st_size < 2_000_000


async def test_an_endpoint_that_is_always_down_stops_the_search(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(SearchError, match="no candidate was evaluated"):
        await run_search(tmp_path / "l", settings, SyntheticEvaluator(data), [None])
    trials = records_of_kind(tmp_path / "l", TrialRecord)
    assert {trial.status for trial in trials} == {"invalid"}
    assert all("the endpoint is down" in trial.reason for trial in trials)


async def test_autoprune_plus_continues_without_its_endpoint(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"strategy": "autoprune+"})
    chosen = await run_search(tmp_path / "l", settings, SyntheticEvaluator(data), [None])
    assert chosen.test.gain.low > 0


async def test_a_failed_evaluation_is_not_scored_as_wrong(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"per_round": 1, "rounds": 4})
    evaluator = SyntheticEvaluator(data)
    await run_search(tmp_path / "free", settings, evaluator)
    (best,) = records_of_kind(tmp_path / "free", WinnerRecord)
    evaluator = SyntheticEvaluator(data)
    evaluator.fails = {best.digest}
    other = await run_search(tmp_path / "l", settings, evaluator)
    assert other.digest != best.digest
    failed = [r for r in records_of_kind(tmp_path / "l", TrialRecord) if r.status == "unevaluated"]
    assert failed and all(r.objective is None and "500" in r.reason for r in failed)


async def test_a_duplicate_of_a_failed_candidate_is_evaluated(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    # Two states of one behaviour: signals are idle where nothing is exchanged for quality.
    one = compact_json(paper_state(settings))
    other = json.loads(json.dumps(one))
    other["scoring"]["signals"].append({"atom": "local_detail_energy", "weight": 0.0})
    settings = settings.model_copy(update={"per_round": 1, "rounds": 8})
    replies = [json.dumps(one), json.dumps(other)]
    await run_search(tmp_path / "free", settings, SyntheticEvaluator(data), replies)
    first = records_of_kind(tmp_path / "free", ProposalRecord)[0]
    evaluator = SyntheticEvaluator(data)
    evaluator.fails = {first.digest}
    await run_search(tmp_path / "l", settings, evaluator, replies)
    trials = records_of_kind(tmp_path / "l", TrialRecord)
    assert {"unevaluated", "evaluated"} <= {trial.status for trial in trials}


async def test_a_duplicate_in_the_round_of_a_failed_candidate_is_evaluated_later(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    failing = paper_state(settings)
    components = json.loads(json.dumps(compact_json(failing)))
    components["scoring"]["signals"].append({"atom": "local_detail_energy", "weight": 0.0})
    duplicate = assemble_state(components, settings)
    source = SyntheticEvaluator(data)
    source.fails = {failing.digest}
    with Ledger(tmp_path / "l") as ledger:
        evaluator = RecordedEvaluator(ledger, source)
        examples = data.examples("search")
        rounds = RoundEvaluator(settings, ledger, evaluator, examples, source.probes())
        history = await rounds.evaluate_baselines(base_state(settings))
        drafts = [Draft("llm", failing), Draft("llm", duplicate)]
        first = await rounds.evaluate_round(drafts, 1, history, False)
        second = await rounds.evaluate_round(drafts[1:], 2, history, False)
    assert [trial.result.status for trial in first] == ["unevaluated", "same"]
    assert [trial.result.status for trial in second] == ["evaluated"]
