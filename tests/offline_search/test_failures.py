from __future__ import annotations

import json
from pathlib import Path

import pytest

from offline_search.candidates import Draft, assemble_state, base_state, paper_state
from offline_search.components import compact_json
from offline_search.dataset import Dataset
from offline_search.evaluator import BaselineFailed, EvaluationJob, RecordedEvaluator
from offline_search.history import Answers, gave_up
from offline_search.ledger import (
    Ledger,
    ReplyRecord,
    Status,
    TrialRecord,
    WinnerRecord,
    read_ledger,
)
from offline_search.report import count_candidates, read_report
from offline_search.rounds import RoundEvaluator
from offline_search.search import NothingMeasured
from offline_search.settings import Settings
from tests.offline_search.replies import HOSTILE
from tests.offline_search.synthetic import (
    VALID_REPLIES,
    SyntheticEvaluator,
    records_of_kind,
    run_search,
)
from vllm_autoprune.errors import EvaluationFailed, SearchError
from vllm_autoprune.tpdsl.state import PruningState


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


async def test_a_model_that_writes_nothing_valid_ends_the_search(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"rounds": 20, "per_round": 4})
    with pytest.raises(NothingMeasured):
        await run_search(tmp_path / "l", settings, SyntheticEvaluator(data), ["no", "{}"])
    trials = records_of_kind(tmp_path / "l", TrialRecord)
    assert len(trials) == 28, "the first whole round after 25 failures, of 80 candidates"
    report = read_report(read_ledger(tmp_path / "l"))
    assert count_candidates(report).endswith("gave up: the last 25 were invalid or unsafe.")


def test_a_search_gives_up_by_failures_in_a_row() -> None:
    def trial(status: Status) -> TrialRecord:
        return TrialRecord(round=1, index=0, status=status)

    failures = [trial("invalid" if number % 2 else "unsafe") for number in range(25)]
    assert not gave_up(failures[1:])
    assert gave_up([trial("evaluated"), *failures])
    for other in (trial("evaluated"), trial("dropped"), trial("same"), trial("unevaluated")):
        assert not gave_up([*failures, other])


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


@pytest.mark.parametrize("same_round", [False, True])
async def test_duplicates_of_a_failed_candidate_are_evaluated_later(
    same_round: bool, settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    failing = paper_state(settings)
    components = json.loads(json.dumps(compact_json(failing)))
    components["scoring"]["signals"].append({"atom": "local_detail_energy", "weight": 0.0})
    duplicate = assemble_state(components, settings)
    source = SyntheticEvaluator(data)
    source.fails = {failing.digest}
    with Ledger(tmp_path / "l") as ledger:
        evaluator = RecordedEvaluator(ledger, source)
        rounds = RoundEvaluator(
            settings, ledger, evaluator, data.examples("search"), source.probes()
        )
        history = await rounds.evaluate_baselines(base_state(settings))

        async def evaluate(number: int, *states: PruningState) -> list[tuple[str, str]]:
            drafts = [Draft("llm", state) for state in states]
            trials = await rounds.evaluate_round(drafts, number, history, early_stopping=False)
            return [(trial.result.status, trial.result.same_as) for trial in trials]

        first = await evaluate(1, failing, *([duplicate] if same_round else []))
        assert first == [("unevaluated", ""), ("same", "1.0")][: len(first)]
        assert await evaluate(2, duplicate) == [("evaluated", "")]
        assert await evaluate(3, failing) == [("same", "2.0")]


class RefusingEvaluator(SyntheticEvaluator):
    """Refuses jobs of a split: those of a digest, or without one those of the unpruned model."""

    def __init__(self, data: Dataset, split: str, digest: str = "") -> None:
        super().__init__(data)
        self.refused = (split, digest)

    async def evaluate(self, job: EvaluationJob) -> Answers:
        digest = "" if job.candidate is None else job.candidate.digest
        if (job.split, digest) == self.refused:
            raise EvaluationFailed("cannot identify image file")
        return await super().evaluate(job)


@pytest.mark.parametrize("split", ["search", "validation", "test"])
@pytest.mark.parametrize("baseline", ["unpruned", "base policy"])
async def test_a_baseline_that_fails_ends_the_search_at_its_start_and_can_be_resumed(
    baseline: str, split: str, settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    digest = "" if baseline == "unpruned" else base_state(settings).digest
    evaluator = RefusingEvaluator(data, split, digest)
    with pytest.raises(BaselineFailed, match=f"the {split} split: cannot identify.* -> "):
        await run_search(tmp_path / "l", settings, evaluator)
    assert not records_of_kind(tmp_path / "l", TrialRecord)
    await run_search(tmp_path / "l", settings, SyntheticEvaluator(data))
    assert records_of_kind(tmp_path / "l", WinnerRecord)


async def test_a_winner_that_cannot_be_measured_on_the_test_split_is_replaced(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    first = await run_search(tmp_path / "free", settings, SyntheticEvaluator(data))
    evaluator = RefusingEvaluator(data, "test", first.digest)
    second = await run_search(tmp_path / "l", settings, evaluator)
    assert second.estimates == first.estimates
    assert second.winner == sorted(first.estimates, key=lambda name: -first.estimates[name])[1]


async def test_a_log_probability_that_is_not_finite_is_a_failure(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    class Undefined(SyntheticEvaluator):
        async def evaluate(self, job: EvaluationJob) -> Answers:
            answers = await super().evaluate(job)
            first = isinstance(job.candidate, PruningState) and job.candidate.digest == undefined
            return (
                Answers((float("nan"), *answers.logprob[1:]), answers.right) if first else answers
            )

    undefined = (await run_search(tmp_path / "free", settings, SyntheticEvaluator(data))).digest
    await run_search(tmp_path / "l", settings, Undefined(data))
    trials = records_of_kind(tmp_path / "l", TrialRecord)
    (failed,) = [trial for trial in trials if trial.status == "unevaluated"]
    assert "not finite" in failed.reason


async def test_half_a_character_in_a_reply_is_recorded(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    replies = ["{\ud83d}", VALID_REPLIES[0]]
    await run_search(tmp_path / "l", settings, SyntheticEvaluator(data), replies)
    assert "{?}" in {record.text for record in records_of_kind(tmp_path / "l", ReplyRecord)}
