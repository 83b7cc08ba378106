from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from offline_search.candidates import Draft, assemble_state, base_state, paper_state
from offline_search.components import compact_json
from offline_search.dataset import Dataset, read_dataset
from offline_search.evaluator import BaselineFailed, EvaluationJob, RecordedEvaluator
from offline_search.history import Answers, gave_up
from offline_search.ledger import (
    Ledger,
    ProposalRecord,
    ReplyRecord,
    Status,
    SummaryRecord,
    TrialRecord,
    VerdictRecord,
    WinnerRecord,
    read_ledger,
)
from offline_search.proposer import SpendingLimits
from offline_search.replay import replay
from offline_search.report import count_candidates, read_report
from offline_search.rounds import RoundEvaluator
from offline_search.search import NothingMeasured
from offline_search.settings import Settings, Strategy
from tests.offline_search.synthetic import (
    HOSTILE,
    REPLIES_OF,
    STATE_STRATEGIES,
    VALID_REPLIES,
    SyntheticEvaluator,
    ledger_digest,
    list_reply,
    records_of_kind,
    run_search,
    valid_replies,
)
from vllm_autoprune import load_state
from vllm_autoprune.errors import EvaluationFailed, SearchError
from vllm_autoprune.tpdsl.state import PruningState


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


@pytest.mark.parametrize("changes", [{"seed": 3}, {"proposals_per_reply": 3}, {"core": True}])
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


RESUMED: dict[str, dict[str, Any]] = {
    **{name: {"strategy": name} for name in REPLIES_OF},
    "lists": {"proposals_per_reply": 3, "per_round": 4},
    "autoprune+ lists": {"strategy": "autoprune+", "proposals_per_reply": 3, "per_round": 4},
    "tpe core": {"strategy": "tpe", "core": True},
    "autoprune+ core": {"strategy": "autoprune+", "core": True, "rank_at": True},
}


@pytest.mark.parametrize("case", RESUMED)
async def test_a_search_resumes_from_any_prefix_repeats_no_step_and_replays(
    case: str, settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"rounds": 2, **RESUMED[case]})
    replies = REPLIES_OF[settings.strategy]
    if settings.proposals_per_reply > 1:
        replies = [*(list_reply(n, 3) for n in range(5)), list_reply(9, 2), HOSTILE["prose"], None]
    whole, again = tmp_path / "whole", tmp_path / "again"
    winner = await run_search(whole, settings, SyntheticEvaluator(data), replies)
    lines = whole.read_bytes().splitlines(keepends=True)
    for end in (*range(0, len(lines), max(1, len(lines) // 4)), len(lines)):
        part = tmp_path / f"part-{end}"
        cut = lines[end][: len(lines[end]) // 2] if end < len(lines) else b""
        part.write_bytes(b"".join(lines[:end]) + cut)
        evaluator = SyntheticEvaluator(data)
        await run_search(part, settings, evaluator, replies if end < len(lines) else [])
        assert ledger_digest(part) == ledger_digest(whole)
        records = [json.loads(line) for line in lines[:end]]
        known = {
            (r["digest"], r["split"], r["start"]) for r in records if r["kind"] == "evaluation"
        }
        for job in evaluator.jobs:
            digest = "full" if job.candidate is None else job.candidate.digest
            assert (digest, job.split, job.start) not in known, "measured again"
    replayed, before, after = await replay(whole, again, data)
    assert before == after == ledger_digest(whole)
    assert replayed.digest == winner.digest and replayed.test == winner.test
    if settings.core:
        states = [one.state or {} for one in records_of_kind(whole, ProposalRecord)]
        assert any(state.get("core") for state in states)


async def test_a_recording_is_only_read(settings: Settings, data: Dataset, tmp_path: Path) -> None:
    recording = tmp_path / "l"
    await run_search(recording, settings, SyntheticEvaluator(data))
    recording.write_bytes(recording.read_bytes() + b'{"kind": "pro')  # cut off by a kill
    content = recording.read_bytes()
    _, before, after = await replay(recording, tmp_path / "replayed", data)
    assert before == after and recording.read_bytes() == content
    with Ledger(recording):  # no replay waits for its lock
        await replay(recording, tmp_path / "again", data)


async def test_a_missing_recording_is_not_created(data: Dataset, tmp_path: Path) -> None:
    with pytest.raises(SearchError, match="name the ledger of a search that has begun"):
        await replay(tmp_path / "typo" / "l", tmp_path / "replayed", data)
    assert not (tmp_path / "typo").exists() and not (tmp_path / "replayed").exists()
    (tmp_path / "empty").touch()
    with pytest.raises(SearchError, match="contains no search"):
        await replay(tmp_path / "empty", tmp_path / "replayed", data)


@pytest.mark.parametrize("change", ["images", "questions"])
async def test_other_data_than_the_recorded_are_named_as_the_cause(
    change: str, settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    evaluator = SyntheticEvaluator(data)
    evaluator.name = f"m through vLLM, data {data.digest[:12]}"
    await run_search(tmp_path / "l", settings, evaluator)
    await replay(tmp_path / "l", tmp_path / "same", data)
    other = read_dataset(data.folder, limit=5)
    if change == "questions":
        path = data.folder / "test.jsonl"
        path.write_text(path.read_text().replace("Is it", "Could it be"))
        other = read_dataset(data.folder)
    with pytest.raises(SearchError, match=r"other questions .* -> give the data folder and the --"):
        await replay(tmp_path / "l", tmp_path / "replayed", other)
    assert not (tmp_path / "replayed").exists()


async def test_an_incomplete_recording_is_an_error(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    await run_search(tmp_path / "l", settings, SyntheticEvaluator(data))
    lines = (tmp_path / "l").read_bytes().splitlines(keepends=True)
    (tmp_path / "l").write_bytes(b"".join(lines[: len(lines) // 2]))
    with pytest.raises(SearchError, match="resume the recorded search"):
        await replay(tmp_path / "l", tmp_path / "replayed", data)


async def test_a_changed_recording_does_not_replay(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    await run_search(tmp_path / "l", settings, SyntheticEvaluator(data))
    first = next(r for r in records_of_kind(tmp_path / "l", ReplyRecord) if r.text)
    changed = valid_replies(31)[-1]
    assert first.text
    old, new = json.dumps(first.text)[1:-1], json.dumps(changed)[1:-1]
    text = (tmp_path / "l").read_text().replace(old, new)
    (tmp_path / "l").write_text(text)
    with pytest.raises(SearchError):
        await replay(tmp_path / "l", tmp_path / "replayed", data)


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
