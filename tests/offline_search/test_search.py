from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from offline_search.candidates import base_state, paper_state
from offline_search.components import compact_json
from offline_search.dataset import Dataset
from offline_search.ledger import (
    ProposalRecord,
    ReplyRecord,
    SummaryRecord,
    TrialRecord,
    VerdictRecord,
    WinnerRecord,
)
from offline_search.proposer import SpendingLimits
from offline_search.search import NothingMeasured
from offline_search.settings import Settings, Strategy
from tests.offline_search.synthetic import (
    STATE_STRATEGIES,
    SyntheticEvaluator,
    records_of_kind,
    run_search,
)
from vllm_autoprune import load_state
from vllm_autoprune.errors import SearchError


@pytest.mark.parametrize("strategy", STATE_STRATEGIES)
async def test_every_strategy_finds_a_state_that_loads(
    strategy: Strategy, settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"strategy": strategy})
    chosen = await run_search(tmp_path / "l", settings, SyntheticEvaluator(data))
    state = load_state(json.dumps(chosen.state))
    assert state.digest == chosen.digest
    assert state.base_policy.name == settings.base_policy
    assert state.provenance.scores["test"] == chosen.test.model_dump(mode="json")
    assert 1 <= len(chosen.confirmed) <= settings.confirmed
    assert chosen.test.gain.low <= chosen.test.gain.value <= chosen.test.gain.high


async def test_every_step_of_the_algorithm_is_a_record(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    await run_search(tmp_path / "l", settings, SyntheticEvaluator(data))
    rounds, each = settings.rounds, settings.per_round
    for kind, number in (
        (ProposalRecord, rounds * each),
        (TrialRecord, rounds * each),
        (SummaryRecord, rounds),
    ):
        assert len(records_of_kind(tmp_path / "l", kind)) == number
    assert len(records_of_kind(tmp_path / "l", ReplyRecord)) >= rounds * each
    assert records_of_kind(tmp_path / "l", VerdictRecord)
    assert records_of_kind(tmp_path / "l", WinnerRecord)


async def test_duplicate_states_are_measured_once(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    paper = json.dumps(compact_json(paper_state(settings)))
    spaced = json.dumps(json.loads(paper), indent=3)
    evaluator = SyntheticEvaluator(data)
    await run_search(tmp_path / "l", settings, evaluator, [paper, spaced])
    trials = records_of_kind(tmp_path / "l", TrialRecord)
    assert [trial.status for trial in trials].count("evaluated") == 1
    assert {trial.same_as for trial in trials if trial.status == "same"} == {"1.0"}
    measured = [job for job in evaluator.jobs if job.split == "search"]
    assert len(measured) == 3, "all tokens, the base policy, and the one candidate"


async def test_probes_detect_states_that_keep_the_same_tokens(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    # No exchange: whatever the signals are, the base policy decides.
    other = compact_json(base_state(settings))
    scoring = other["scoring"]
    assert isinstance(scoring, dict)
    scoring["signals"] = [{"atom": "local_detail_energy", "weight": 2.0}]
    better = json.dumps(compact_json(paper_state(settings, quota=4)))
    for probes, status in ((True, "same"), (False, "evaluated")):
        path = tmp_path / str(probes)
        evaluator = SyntheticEvaluator(data, probes=probes)
        await run_search(path, settings, evaluator, [json.dumps(other), better])
        outcomes = {
            trial.same_as or trial.status
            for trial, proposal in zip(
                records_of_kind(path, TrialRecord),
                records_of_kind(path, ProposalRecord),
                strict=True,
            )
            if proposal.state is not None and "local_detail_energy" in json.dumps(proposal.state)
        }
        assert ("base" in outcomes) == (status == "same"), outcomes


async def test_spending_limits_stop_requests(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    for limits in (SpendingLimits(tokens=400), SpendingLimits(money=0.025)):
        path = tmp_path / str(limits.tokens)
        await run_search(path, settings, SyntheticEvaluator(data), limits=limits)
        replies = records_of_kind(path, ReplyRecord)
        spent = [r for r in replies if "is spent" in r.failure]
        assert spent and sum(r.cost.money for r in spent) == 0
        # A round sends its requests together, so it may exceed the limit by those in flight.
        assert len(replies) - len(spent) <= settings.per_round * 2


async def test_several_budgets_are_aggregated(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"budgets": (8, 4)})
    evaluator = SyntheticEvaluator(data)
    await run_search(tmp_path / "l", settings, evaluator)
    measured = {
        (job.candidate.digest, job.budget) for job in evaluator.jobs if job.candidate is not None
    }
    assert {budget for _, budget in measured} == {8, 4}
    trials = records_of_kind(tmp_path / "l", TrialRecord)
    evaluated = [trial for trial in trials if trial.status == "evaluated"]
    assert all(trial.examples == 2 * len(data.examples("search")) for trial in evaluated)


async def test_early_stopping_saves_evaluations(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"strategy": "autoprune+", "rounds": 4})
    await run_search(tmp_path / "l", settings, SyntheticEvaluator(data))
    trials = records_of_kind(tmp_path / "l", TrialRecord)
    size = len(data.examples("search"))
    dropped = [trial for trial in trials if trial.status == "dropped"]
    assert dropped and all(trial.examples < size for trial in dropped)
    # The last round may exceed the budget by the candidates in flight.
    assert (
        sum(t.examples for t in trials) <= (settings.total_candidates + settings.per_round) * size
    )


async def test_the_winner_has_the_best_combined_estimate(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    evaluator = SyntheticEvaluator(data)
    chosen = await run_search(tmp_path / "l", settings, evaluator)
    best = max(chosen.estimates, key=lambda name: chosen.estimates[name])
    assert chosen.winner == best
    results = {f"{r.round}.{r.index}": r for r in records_of_kind(tmp_path / "l", TrialRecord)}
    searched, validated = len(data.examples("search")), len(data.examples("validation"))
    for name, validation in chosen.confirmed.items():
        total = searched * (results[name].objective or 0) + validated * validation.objective.value
        assert chosen.estimates[name] == pytest.approx(total / (searched + validated), abs=1e-5)
    tested = {
        job.candidate.digest for job in evaluator.jobs if job.split == "test" and job.candidate
    }
    assert tested == {chosen.digest, base_state(settings).digest}


@pytest.mark.parametrize("changes", [{"race": True}, {"proposals_per_reply": 3}, {"core": True}])
async def test_resuming_with_another_setting_names_it(
    changes: dict[str, object], settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"rounds": 1})
    other = settings.model_copy(update=changes)
    (name,) = changes
    for number, (before, after) in enumerate([(settings, other), (other, settings)]):
        path = tmp_path / str(number)
        with suppress(NothingMeasured):
            await run_search(path, before, SyntheticEvaluator(data))
        with pytest.raises(SearchError, match=f"{name} is .*, was .* -> give"):
            await run_search(path, after, SyntheticEvaluator(data))
