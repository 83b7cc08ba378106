from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from offline_search.candidates import base_state, paper_state
from offline_search.components import JsonObject, compact_json
from offline_search.dataset import SPLITS, Dataset, read_dataset
from offline_search.evaluator import BaselineFailed, EvaluationJob
from offline_search.history import Answers, gave_up
from offline_search.ledger import (
    Ledger,
    ProposalRecord,
    ReplyRecord,
    SettingsRecord,
    Status,
    SummaryRecord,
    TrialRecord,
    VerdictRecord,
    WinnerRecord,
    read_ledger,
)
from offline_search.prompt import Messages
from offline_search.proposer import Reply, SpendingLimits
from offline_search.replay import replay
from offline_search.report import as_markdown, read_report
from offline_search.search import NothingMeasured, Search
from tests.offline_search.synthetic import (
    HOSTILE,
    REPLIES_OF,
    VALID_REPLIES,
    ScriptedProposer,
    Searches,
    SyntheticEvaluator,
    list_reply,
    settings_of,
    valid_replies,
)
from vllm_autoprune import load_state
from vllm_autoprune.errors import EvaluationFailed, SearchError

SIZE = 24
"""Examples of each split."""


async def test_every_step_of_the_algorithm_is_a_record(search: Searches) -> None:
    winner = await search()
    for kind, number in ((ProposalRecord, 9), (TrialRecord, 9), (SummaryRecord, 3)):
        assert len(search.records(kind)) == number
    assert len(search.records(ReplyRecord)) >= 9 and search.records(VerdictRecord)
    assert search.records(WinnerRecord)

    state = load_state(json.dumps(winner.state))
    assert state.digest == winner.digest and state.base_policy.name == "cdpruner"
    assert state.provenance.scores["test"] == winner.test.model_dump(mode="json")
    assert winner.test.gain.low <= winner.test.gain.value <= winner.test.gain.high

    # The winner is the best on search and validation examples together; only it is tested.
    assert winner.winner == max(winner.estimates, key=lambda name: winner.estimates[name])
    results = {record.name: record.objective or 0 for record in search.records(TrialRecord)}
    assert 1 <= len(winner.confirmed) <= 5
    for name, validation in winner.confirmed.items():
        mean = (results[name] + validation.objective.value) / 2
        assert winner.estimates[name] == pytest.approx(mean, abs=1e-5)
    jobs = [job for job in search.evaluator.jobs if job.split == "test" and job.candidate]
    digests = {job.candidate.digest for job in jobs if job.candidate}
    assert digests == {winner.digest, base_state(settings_of()).digest}


async def test_duplicate_states_are_measured_once(search: Searches) -> None:
    paper = json.dumps(compact_json(paper_state(settings_of())))
    await search([paper, json.dumps(json.loads(paper), indent=3)])
    trials = search.records(TrialRecord)
    assert [trial.status for trial in trials].count("evaluated") == 1
    assert {trial.same_as for trial in trials if trial.status == "same"} == {"1.0"}
    jobs = [job for job in search.evaluator.jobs if job.split == "search"]
    assert len(jobs) == 3, "all tokens, the base policy, and the one candidate"


@pytest.mark.parametrize("probes", [True, False])
async def test_probes_detect_states_that_keep_the_same_tokens(
    probes: bool, search: Searches
) -> None:
    settings = settings_of()
    # No exchange: whatever the signals are, the base policy decides.
    idle = json.loads(json.dumps(compact_json(base_state(settings))))
    idle["scoring"]["signals"] = [{"atom": "local_detail_energy", "weight": 2.0}]
    better = json.dumps(compact_json(paper_state(settings, quota=4)))
    await search([json.dumps(idle), better], SyntheticEvaluator(search.data, probes=probes))
    proposed = {record.name: json.dumps(record.state) for record in search.records(ProposalRecord)}
    outcomes = {
        trial.same_as or trial.status
        for trial in search.records(TrialRecord)
        if "local_detail_energy" in proposed[trial.name]
    }
    assert ("base" in outcomes) == probes


@pytest.mark.parametrize("limits", [SpendingLimits(tokens=400), SpendingLimits(money=0.025)])
async def test_spending_limits_stop_requests(limits: SpendingLimits, search: Searches) -> None:
    await search(limits=limits)
    replies = search.records(ReplyRecord)
    spent = [reply for reply in replies if "is spent" in reply.failure]
    assert spent and sum(reply.cost.money for reply in spent) == 0
    # A round sends its requests together, so it may exceed the limit by those in flight.
    assert len(replies) - len(spent) <= 6


async def test_a_candidate_is_measured_at_every_budget(search: Searches) -> None:
    await search(budgets=(8, 4))
    assert {job.budget for job in search.evaluator.jobs if job.candidate is not None} == {8, 4}
    trials = search.records(TrialRecord)
    assert {trial.examples for trial in trials if trial.status == "evaluated"} == {2 * SIZE}


@pytest.mark.parametrize("changes", [{"seed": 3}, {"proposals_per_reply": 3}, {"core": True}])
async def test_resuming_with_another_setting_names_it(
    changes: dict[str, Any], search: Searches
) -> None:
    (name,) = changes
    plain: dict[str, Any] = {}
    for before, after in ((plain, changes), (changes, plain)):
        ledger = str(len(before))
        with suppress(NothingMeasured):
            await search(ledger=ledger, rounds=1, **before)
        with pytest.raises(SearchError, match=f"{name} is .*, was .* -> give"):
            await search(ledger=ledger, rounds=1, **after)


RESUMED: dict[str, dict[str, Any]] = {
    **{name: {"strategy": name} for name in REPLIES_OF},
    "lists": {"proposals_per_reply": 3, "per_round": 4},
    "autoprune+ lists": {"strategy": "autoprune+", "proposals_per_reply": 3, "per_round": 4},
    "tpe core": {"strategy": "tpe", "core": True},
    "autoprune+ core": {"strategy": "autoprune+", "core": True, "rank_at": True},
}


@pytest.mark.parametrize("case", RESUMED)
async def test_a_search_resumes_from_any_prefix_repeats_no_step_and_replays(
    case: str, search: Searches, tmp_path: Path
) -> None:
    changes = {"rounds": 2, **RESUMED[case]}
    replies = REPLIES_OF[changes.get("strategy", "autoprune")]
    if "lists" in case:
        replies = [*(list_reply(n, 3) for n in range(5)), list_reply(9, 2), HOSTILE["prose"], None]
    winner = await search(replies, ledger="complete", **changes)
    complete, digest = search.path, search.digest()
    lines = complete.read_bytes().splitlines(keepends=True)
    for end in (*range(0, len(lines), max(1, len(lines) // 4)), len(lines)):
        cut = lines[end][: len(lines[end]) // 2] if end < len(lines) else b""
        (tmp_path / f"part-{end}").write_bytes(b"".join(lines[:end]) + cut)
        # A complete ledger needs no reply.
        needed = replies if end < len(lines) else ["no"]
        await search(needed, ledger=f"part-{end}", **changes)
        assert search.digest() == digest
        records = [json.loads(line) for line in lines[:end]]
        known = {(r["digest"], r["split"], r["start"]) for r in records
                 if r["kind"] == "evaluation"}  # fmt: skip
        for job in search.evaluator.jobs:
            whose = "full" if job.candidate is None else job.candidate.digest
            assert (whose, job.split, job.start) not in known, "measured again"
    replayed, before, after = await replay(complete, tmp_path / "again", search.data)
    assert before == after == digest
    assert replayed.digest == winner.digest and replayed.test == winner.test
    if changes.get("core"):
        states = [record.state or {} for record in search.records(ProposalRecord)]
        assert any(state.get("core") for state in states)


RECORDED = Path(__file__).parent / "recorded"


@pytest.mark.parametrize(
    ("name", "digest"), [("lists", "b942f64aed6b"), ("crossovers", "21825c1cb814")]
)
async def test_a_recorded_search_replays_and_would_send_the_same_prompts_today(
    name: str, digest: str, search: Searches, tmp_path: Path
) -> None:
    recording = RECORDED / f"{name}.jsonl"
    _, before, after = await replay(recording, tmp_path / "again", search.data)
    assert before == after and after.startswith(digest)
    records = read_ledger(recording)
    replies = {record.key: record for record in records if isinstance(record, ReplyRecord)}

    class RecordedProposer(ScriptedProposer):
        async def reply(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
            number, index = divmod(seed, 1009)  # as the seed of a request is made
            attempt = "first" if len(messages) == 2 else "repair"
            record = replies[f"reply/{number}/{index}/{attempt}"]
            request = hashlib.sha256(json.dumps(messages).encode()).hexdigest()
            assert request == record.request, record.key
            return Reply(record.text, record.failure, record.cost)

    (opened,) = (record for record in records if isinstance(record, SettingsRecord))
    others = [record for record in records if not isinstance(record, ReplyRecord)]
    evaluator, proposer = SyntheticEvaluator(search.data), RecordedProposer([])
    with Ledger(tmp_path / "sent", others) as ledger:
        await Search(opened.settings, ledger, evaluator, proposer).run()
        assert ledger.digest() == after
    assert not evaluator.jobs


async def test_a_recording_is_only_read(search: Searches, tmp_path: Path) -> None:
    await search()
    recording = search.path
    recording.write_bytes(recording.read_bytes() + b'{"kind": "pro')  # cut off by a kill
    content = recording.read_bytes()
    _, before, after = await replay(recording, tmp_path / "replayed", search.data)
    assert before == after and recording.read_bytes() == content
    with Ledger(recording):  # no replay waits for its lock
        await replay(recording, tmp_path / "again", search.data)


async def test_a_recording_that_cannot_be_replayed_is_an_error(
    search: Searches, tmp_path: Path
) -> None:
    await search()
    text = search.path.read_text()
    lines = text.splitlines(keepends=True)
    reply = next(record.text for record in search.records(ReplyRecord) if record.text)
    old, new = (json.dumps(written)[1:-1] for written in (reply, valid_replies(31)[-1]))
    recording, target = tmp_path / "recording", tmp_path / "replayed"
    for content, message in (
        ("", "contains no search"),
        ("".join(lines[: len(lines) // 2]), "resume the recorded search"),
        (text.replace(old, new), "recor"),
    ):
        recording.write_text(content)
        target.unlink(missing_ok=True)
        with pytest.raises(SearchError, match=message):
            await replay(recording, target, search.data)
    with pytest.raises(SearchError, match="name the ledger of a search that has begun"):
        await replay(tmp_path / "typo" / "l", target, search.data)
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize("change", ["images", "questions"])
async def test_other_data_than_the_recorded_are_named_as_the_cause(
    change: str, search: Searches, tmp_path: Path
) -> None:
    evaluator = SyntheticEvaluator(search.data)
    evaluator.name = f"m through vLLM, data {search.data.digest[:12]}"
    await search(evaluator=evaluator)
    await replay(search.path, tmp_path / "same", search.data)
    folder = search.data.folder
    other = read_dataset(folder, limit=5)
    if change == "questions":
        path = folder / "test.jsonl"
        path.write_text(path.read_text().replace("Is it", "Could it be"))
        other = read_dataset(folder)
    with pytest.raises(SearchError, match=r"other questions .* -> give the data folder and the --"):
        await replay(search.path, tmp_path / "replayed", other)
    assert not (tmp_path / "replayed").exists()


async def test_hostile_replies_are_invalid_proposals_and_the_search_continues(
    search: Searches,
) -> None:
    replies = [*HOSTILE.values(), "{\ud83d}", *VALID_REPLIES[:3]]
    await search(ScriptedProposer(replies, in_order=True), rounds=2, per_round=10)
    trials = search.records(TrialRecord)
    assert len(trials) == 20 and "evaluated" in {trial.status for trial in trials}
    assert all(trial.status != "invalid" or trial.reason for trial in trials)
    assert search.path.stat().st_size < 2_000_000
    written = {record.text for record in search.records(ReplyRecord)}
    assert "{?}" in written, "half a character is recorded"


async def test_an_endpoint_that_is_always_down_stops_the_search(search: Searches) -> None:
    with pytest.raises(SearchError, match="no candidate was evaluated"):
        await search([None])
    trials = search.records(TrialRecord)
    assert {trial.status for trial in trials} == {"invalid"}
    assert all("the endpoint is down" in trial.reason for trial in trials)
    winner = await search([None], ledger="plus", strategy="autoprune+")
    assert winner.test.gain.low > 0, "it proposes by other means as well"


async def test_a_model_that_writes_nothing_valid_ends_the_search(search: Searches) -> None:
    with pytest.raises(NothingMeasured):
        await search(["no", "{}"], rounds=20, per_round=4)
    trials = search.records(TrialRecord)
    assert len(trials) == 28, "the first complete round after 25 failures, of 80 candidates"
    text = as_markdown(read_report(read_ledger(search.path)))
    assert "gave up: the last 25 were invalid or unsafe." in text


def test_a_search_gives_up_by_failures_in_a_row() -> None:
    def trial(status: Status) -> TrialRecord:
        return TrialRecord(round=1, index=0, status=status)

    failures = [trial("invalid" if number % 2 else "unsafe") for number in range(25)]
    assert not gave_up(failures[1:])
    assert gave_up([trial("evaluated"), *failures])
    for other in (trial("evaluated"), trial("dropped"), trial("same"), trial("unevaluated")):
        assert not gave_up([*failures, other])


class FailingEvaluator(SyntheticEvaluator):
    """Refuses a candidate by its digest, or the unpruned model; or its figures are not finite."""

    def __init__(
        self, data: Dataset, digest: str, split: str = "", undefined: bool = False
    ) -> None:
        super().__init__(data)
        self.digest, self.splits, self.undefined = digest, (split,) if split else SPLITS, undefined

    def answer(self, job: EvaluationJob) -> Answers:
        answers = super().answer(job)
        digest = "full" if job.candidate is None else job.candidate.digest
        if digest != self.digest or job.split not in self.splits:
            return answers
        if self.undefined:
            return Answers((float("nan"), *answers.logprob[1:]), answers.right)
        raise EvaluationFailed("cannot identify image file")


@pytest.mark.parametrize("undefined", [False, True])
async def test_a_failed_evaluation_is_not_scored_as_wrong(
    undefined: bool, search: Searches
) -> None:
    best = (await search(ledger="free")).digest
    failing = FailingEvaluator(search.data, best, undefined=undefined)
    assert (await search(evaluator=failing)).digest != best
    trials = [each for each in search.records(TrialRecord) if each.status == "unevaluated"]
    reason = "not finite" if undefined else "cannot identify"
    assert trials and all(each.objective is None and reason in each.reason for each in trials)


@pytest.mark.parametrize("per_round", [1, 2])
async def test_duplicates_of_a_failed_candidate_are_evaluated_later(
    per_round: int, search: Searches
) -> None:
    paper = paper_state(settings_of())
    body = json.loads(json.dumps(compact_json(paper)))
    body["scoring"]["signals"].append({"atom": "local_detail_energy", "weight": 0.0})
    original, duplicate = json.dumps(compact_json(paper)), json.dumps(body)
    in_round: list[tuple[str, str, str]] = [(duplicate, "same", "1.0")] * (per_round - 1)
    expected = [
        (original, "unevaluated", ""), *in_round, (duplicate, "evaluated", ""),
        (original, "same", "2.0"),
    ]  # fmt: skip
    proposer = ScriptedProposer([text for text, *_ in expected], in_order=True)
    failing = FailingEvaluator(search.data, paper.digest)
    await search(proposer, failing, rounds=len(expected) // per_round, per_round=per_round)
    trials = search.records(TrialRecord)
    assert [(trial.status, trial.same_as) for trial in trials] == [row[1:] for row in expected]


@pytest.mark.parametrize("split", ["search", "validation", "test"])
@pytest.mark.parametrize("baseline", ["unpruned", "base policy"])
async def test_a_baseline_that_fails_ends_the_search_at_its_start_and_can_be_resumed(
    baseline: str, split: str, search: Searches
) -> None:
    digest = "full" if baseline == "unpruned" else base_state(settings_of()).digest
    with pytest.raises(BaselineFailed, match=f"the {split} split: cannot identify.* -> "):
        await search(evaluator=FailingEvaluator(search.data, digest, split))
    assert not search.records(TrialRecord)
    await search()
    assert search.records(WinnerRecord)


async def test_a_winner_that_cannot_be_measured_on_the_test_split_is_replaced(
    search: Searches,
) -> None:
    free = await search(ledger="free")
    winner = await search(evaluator=FailingEvaluator(search.data, free.digest, "test"))
    assert winner.estimates == free.estimates
    assert winner.winner == sorted(free.estimates, key=lambda name: -free.estimates[name])[1]


def test_importing_the_search_loads_no_server_and_no_model_library() -> None:
    """So that the command line starts quickly."""
    code = (
        "import sys, offline_search.search, offline_search.replay, offline_search.report\n"
        "print({'vllm', 'transformers', 'optuna', 'openevolve', 'matplotlib'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert printed.stdout.strip() == "set()"
