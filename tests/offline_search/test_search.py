"""A search as a whole: its records, resuming and replaying, and failures of what it runs on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from offline_search.candidates import base_state, paper_state
from offline_search.components import JsonObject, compact_json
from offline_search.evaluator import EvaluationJob
from offline_search.history import Answers
from offline_search.ledger import (
    Ledger,
    ProposalRecord,
    ReplyRecord,
    SettingsRecord,
    Standing,
    SummaryRecord,
    TrialRecord,
    VerdictRecord,
    WinnerRecord,
    digest_records,
    read_ledger,
    select_records,
)
from offline_search.prompt import Messages
from offline_search.proposer import Reply
from offline_search.report import read_report
from offline_search.search import NothingMeasured, Search, replay
from tests.offline_search.rewrite_recorded import RECORDED, RecordedProposer
from tests.offline_search.synthetic import (
    HOSTILE,
    REPLIES_OF,
    SIZE,
    ScriptedProposer,
    Searches,
    SyntheticEvaluator,
    digest_of,
    failing,
    list_reply,
    settings_of,
)
from vllm_autoprune import load_state
from vllm_autoprune.errors import EvaluationFailed, SearchError

PAPER = json.dumps(compact_json(paper_state(settings_of())))
BASE = base_state(settings_of())


async def test_every_step_of_the_algorithm_is_a_record(search: Searches) -> None:
    await search()
    for kind, number in ((ProposalRecord, 9), (TrialRecord, 9), (SummaryRecord, 3)):
        assert len(search.records(kind)) == number
    assert len(search.records(ReplyRecord)) >= 9 and search.records(VerdictRecord)
    assert len(search.records(WinnerRecord)) == 1


async def test_the_winning_state_says_where_it_comes_from_and_what_it_scored(
    search: Searches,
) -> None:
    winner = await search()
    state = load_state(json.dumps(winner.state))
    assert state.digest == winner.digest
    assert state.name == "cdpruner-searched-k8"
    assert state.provenance.scores["test"] == winner.test.model_dump(mode="json")
    assert state.provenance.seed == 0 and "synthetic" in state.provenance.evaluated_on
    gain = winner.test.gain
    assert gain.low <= gain.value <= gain.high
    described = f"ahead by {gain.value:.3f} ({gain.low:.3f} to {gain.high:.3f})"
    if gain.value < 0:
        described = f"behind by {-gain.value:.3f} ({-gain.high:.3f} to {-gain.low:.3f})"
    assert f"{described} on test." in state.provenance.notes


@pytest.mark.parametrize("default", ["trim", "cdpruner"])
async def test_the_winner_is_compared_with_the_default_state_unless_that_is_its_base(
    default: str, search: Searches
) -> None:
    winner = await search(default_state=default)
    text = read_report(read_ledger(search.path)).document().answer
    assert ("the default state of this model" in text) == (default == "trim")
    if default == "cdpruner":
        assert winner.less_default is None
        return
    less = winner.less_default
    assert less is not None and less.objective == winner.test.objective
    assert less.gain != winner.test.gain
    scores = load_state(json.dumps(winner.state)).provenance.scores
    assert scores["test_less_default"] == less.model_dump(mode="json")


async def test_the_winner_has_the_best_lower_bound_and_is_tested_alone(
    search: Searches,
) -> None:
    winner = await search()
    assert winner.winner == max(winner.gains, key=lambda name: winner.gains[name].low)
    tested = {digest_of(job) for job in search.evaluator.jobs if job.split == "test"}
    assert tested == {winner.digest, BASE.digest, "full"}


async def test_finalists_are_measured_on_the_questions_of_two_splits(
    search: Searches,
) -> None:
    winner = await search(confirmed=2)
    results = {
        record.name: record.objective or 0 for record in search.records(TrialRecord)
    }
    assert len(winner.confirmed) == 2
    assert (
        min(results[name] for name in winner.confirmed)
        == sorted(value for value in results.values() if value)[-2]
    )
    for name, validation in winner.confirmed.items():
        mean = (results[name] + validation.objective.value) / 2
        assert winner.estimates[name] == pytest.approx(mean, abs=1e-5)


async def test_duplicate_states_are_measured_once_at_every_budget(
    search: Searches,
) -> None:
    await search([PAPER, json.dumps(json.loads(PAPER), indent=3)], budgets=(8, "1/4"))
    trials = search.records(TrialRecord)
    assert [trial.status for trial in trials].count("evaluated") == 1
    assert {trial.same_as for trial in trials if trial.status == "same"} == {"1.0"}
    assert trials[0].examples == 2 * SIZE
    jobs = [
        (digest_of(job), job.budget)
        for job in search.evaluator.jobs
        if job.split == "search"
    ]
    assert len(jobs) == len(set(jobs)) == 1 + 2 * 2, (
        "all tokens, base policy, the one candidate"
    )


@pytest.mark.parametrize("probes", [True, False])
async def test_probes_detect_states_that_keep_the_same_tokens(
    probes: bool, search: Searches
) -> None:
    # No exchange: whatever the signals are, the base policy decides.
    idle = json.loads(json.dumps(compact_json(BASE)))
    idle["scoring"]["signals"] = [{"atom": "local_detail_energy", "weight": 2.0}]
    replies = ScriptedProposer([json.dumps(idle), PAPER], in_order=True)
    await search(
        replies, SyntheticEvaluator(search.data, probes), rounds=1, per_round=2
    )
    idle_trial, paper_trial = search.records(TrialRecord)
    assert (
        idle_trial.same_as == ("base" if probes else "")
        and paper_trial.status == "evaluated"
    )


async def test_a_spending_limit_stops_requests(search: Searches) -> None:
    await search(most_money=0.025)
    replies = search.records(ReplyRecord)
    spent = [reply for reply in replies if "is spent" in reply.failure]
    assert spent and sum(reply.cost.money for reply in spent) == 0
    # A round sends its requests together, so it may exceed the limit by those in flight.
    assert len(replies) - len(spent) <= 6


async def test_a_search_for_mmes_total_finds_what_log_probability_hides(
    search: Searches,
) -> None:
    def answer(job: EvaluationJob, answers: Answers) -> Answers:
        """An exchange of few tokens answers more questions, at lower probabilities."""
        count = len(answers)
        if job.candidate is None:
            return Answers((0.0,) * count, (True,) * count)
        few = '"q_e":1' in job.candidate.model_dump_json()
        correct = tuple(bool(few or number % 2) for number in range(count))
        return Answers((-2.0 if few else -1.0,) * count, correct)

    for objective, total, values in (
        ("mme", 400, {0.0, -0.3}),
        ("quality", 100, {-1.0, -2.0}),
    ):
        winner = await search(
            evaluator=SyntheticEvaluator(search.data, False, answer),
            ledger=objective,
            objective=objective,
            strategy="random",
            rounds=4,
            per_round=5,
            proposer="",
        )
        assert {trial.objective for trial in search.records(TrialRecord)} == values
        assert winner.test.mme_total == total
        assert ("thousand points" in str(winner.state)) == (objective == "mme")


# ---- fresh questions ----


def standings_of(search: Searches) -> list[Standing]:
    """Who led after each round."""
    records = search.records(SummaryRecord)
    return [record.standing for record in records if record.standing]


async def test_each_round_has_fresh_questions_which_leaders_are_asked_too(
    search: Searches,
) -> None:
    winner = await search(
        strategy="random", proposer="", rounds=4, per_round=3, block=8
    )
    pool = search.evaluator.dataset.splits["search"]
    jobs = search.evaluator.jobs
    for start in range(0, len(pool), 8):
        categories = [example.category for example in pool[start : start + 8]]
        assert categories.count("digit") == categories.count("colour") == 4
    answered: dict[str, set[int]] = {}
    for job in jobs:
        if job.split == "search":
            questions = answered.setdefault(digest_of(job), set())
            block = {*range(job.start, job.stop)}
            assert not questions & block, "nothing is asked twice"
            questions |= block
    assert answered["full"] == answered[BASE.digest] == {*range(len(pool))}
    names = {record.digest: record.name for record in search.records(ProposalRecord)}
    counts = {
        name: len(answered[digest])
        for digest, name in names.items()
        if digest in answered
    }
    standings = standings_of(search)
    assert max(counts.values()) > 8, "leaders are asked again in the next round"
    assert counts["4.0"] == 8 and len(standings) == 4
    again = sum(counts.values()) - 8 * len(counts)
    assert standings[-1].answers == sum(counts.values()) and again > 0
    assert winner.gains[winner.winner].low == max(
        gain.low for gain in winner.gains.values()
    )


async def test_gains_do_not_depend_on_how_often_a_finalist_was_asked(
    search: Searches,
) -> None:
    """The validation questions are harder, and a larger share of what a late candidate answers."""

    def loss(digest: str) -> float:
        return 0.5 if digest == BASE.digest else int(digest[:2], 16) / 256

    def answer(job: EvaluationJob, answers: Answers) -> Answers:
        level = 0.0 if job.candidate is None else loss(digest_of(job))
        level += 9.0 * (job.split == "validation" and job.candidate is not None)
        return Answers((-level,) * len(answers), answers.right)

    winner = await search(
        strategy="random", proposer="", rounds=4, block=8, change=answer
    )
    proposals = search.records(ProposalRecord)
    digests = {record.name: record.digest for record in proposals}
    losses = {name: loss(digests[name]) for name in winner.gains}
    for name, gain in winner.gains.items():
        assert gain.value == pytest.approx(0.5 - losses[name], abs=1e-5)
    assert losses[winner.winner] == min(losses.values())


async def test_a_search_whose_leaders_are_tied_goes_elsewhere_and_then_stops(
    search: Searches,
) -> None:
    def no_difference(job: EvaluationJob, answers: Answers) -> Answers:
        low = 0.3 * (digest_of(job) == BASE.digest) + 0.001 * (
            int(digest_of(job)[0], 16) % 2
        )
        return Answers((-low,) * len(answers), answers.right)

    await search(
        strategy="autoprune+",
        proposer="",
        rounds=12,
        block=8,
        resolution=0.01,
        change=no_difference,
    )
    standings = standings_of(search)
    plateaus = [standing.plateaus for standing in standings]
    assert plateaus[-1] == 2 and len(plateaus) >= 5
    changed = 1 + plateaus.index(1)
    later = {
        record.origin
        for record in search.records(ProposalRecord)
        if record.round > changed
    }
    assert later <= {"random", "tpe", "warm start"}, "no variants of what is tied"
    stops = [line for line in search.lines if line.startswith("plateau")]
    assert "goes on with other structures" in stops[0] and "stops, with" in stops[-1]
    assert standings[-1].answers < 12 * 3 * 8 * 0.8, (
        "the rest of the budget is given back"
    )


async def test_a_search_whose_leader_stays_ahead_stops(search: Searches) -> None:
    """Nothing is tied with it, and nothing better is found."""
    leader: list[str] = []

    def answer(job: EvaluationJob, answers: Answers) -> Answers:
        digest = digest_of(job)
        if digest not in ("full", BASE.digest, *leader) and not leader:
            leader.append(digest)
        return Answers(
            (-float(digest not in ("full", *leader)),) * len(answers), answers.right
        )

    winner = await search(
        strategy="autoprune+",
        proposer="",
        rounds=12,
        block=8,
        resolution=0.01,
        change=answer,
    )
    standings = standings_of(search)
    plateaus = [standing.plateaus for standing in standings]
    assert [*dict.fromkeys(plateaus)] == [0, 2]
    assert winner.digest == leader[0]
    assert 0.5 <= standings[-1].answers / (12 * 3 * 8) < 0.7, "the rest is given back"


# ---- resuming and replaying ----


RESUMED: dict[str, dict[str, Any]] = {
    **{name: {"strategy": name} for name in REPLIES_OF},
    "lists": {"proposals_per_reply": 3, "per_round": 4},
    "autoprune+ lists": {
        "strategy": "autoprune+",
        "proposals_per_reply": 3,
        "per_round": 4,
    },
    "tpe core": {"strategy": "tpe", "core": True},
    "autoprune+ core": {"strategy": "autoprune+", "core": True, "rank_at": True},
    "fresh questions": {"strategy": "autoprune+", "block": 8, "proposals_per_reply": 3},
    "several models": {"strategy": "autoprune+", "block": 8, "models": ("a", "b")},
}


@pytest.mark.parametrize("case", RESUMED)
async def test_a_search_resumes_from_any_prefix_repeats_no_step_and_replays(
    case: str, search: Searches, tmp_path: Path
) -> None:
    changes = {"rounds": 2, **RESUMED[case]}
    replies = REPLIES_OF[changes.get("strategy", "autoprune")]
    if "proposals_per_reply" in changes:
        replies = [
            *(list_reply(n, 3) for n in range(5)),
            list_reply(9, 2),
            HOSTILE["prose"],
            None,
        ]
    winner = await search(replies, ledger="complete", **changes)
    complete = search.path
    digest = search.digest()
    lines = complete.read_bytes().splitlines(keepends=True)
    for end in (*range(0, len(lines), max(1, len(lines) // 3)), len(lines)):
        cut = lines[end][: len(lines[end]) // 2] if end < len(lines) else b""
        (tmp_path / f"part-{end}").write_bytes(b"".join(lines[:end]) + cut)
        # A complete ledger needs no reply.
        await search(
            replies if end < len(lines) else ["no"], ledger=f"part-{end}", **changes
        )
        assert search.digest() == digest
        records = [json.loads(line) for line in lines[:end]]
        recorded = {
            (record["digest"], record["split"], record["start"])
            for record in records
            if record["kind"] == "evaluation"
        }
        measured = {
            (digest_of(job), job.split, job.start) for job in search.evaluator.jobs
        }
        assert not recorded & measured, "measured again"
    replayed = await replay(complete, tmp_path / "again", search.data.folder)
    assert (replayed.recorded, replayed.replayed) == (digest, digest)
    assert replayed.winner.digest == winner.digest
    assert replayed.winner.test == winner.test
    if changes.get("core"):
        states = [record.state or {} for record in search.records(ProposalRecord)]
        assert any(state.get("core") for state in states)


@pytest.mark.parametrize(
    ("name", "digest"), [("lists", "d7318677339b"), ("crossovers", "3c43580c3e2c")]
)
async def test_a_recorded_search_replays_and_would_send_the_same_prompts_today(
    name: str, digest: str, search: Searches, tmp_path: Path
) -> None:
    recording = RECORDED / f"{name}.jsonl"
    _, original, replayed, _ = await replay(
        recording, tmp_path / "again", search.data.folder
    )
    assert original == replayed and replayed.startswith(digest)
    records = read_ledger(recording)
    replies = select_records(records, ReplyRecord)
    requests = list[str]()

    class Checked(RecordedProposer):
        async def reply(
            self, messages: Messages, schema: JsonObject | None, seed: int
        ) -> Reply:
            requests.append(hashlib.sha256(json.dumps(messages).encode()).hexdigest())
            return await super().reply(messages, schema, seed)

    (opened,) = select_records(records, SettingsRecord)
    unanswered = [record for record in records if not isinstance(record, ReplyRecord)]
    evaluator = SyntheticEvaluator(search.data)
    with Ledger(tmp_path / "sent", unanswered) as ledger:
        await Search(opened.settings, ledger, evaluator, Checked(replies)).run()
        assert digest_records(ledger) == replayed
    assert sorted(requests) == sorted(record.request for record in replies)
    assert not evaluator.jobs


async def test_a_recording_is_only_read_and_what_is_missing_in_it_is_an_error(
    search: Searches, tmp_path: Path
) -> None:
    await search()
    recording = search.path
    target = tmp_path / "replayed"
    text = f'{recording.read_text()}{{"kind": "pro'  # cut off by a kill
    recording.write_text(text)
    with Ledger(recording) as ledger:  # no replay waits for its lock
        recording.write_text(text)
        _, *digests, _ = await replay(recording, target, search.data.folder)
        assert digests == [digest_records(ledger)] * 2
        assert recording.read_text() == text
    lines = text.splitlines(keepends=True)
    for content, message in (
        ("", "contains no search"),
        ("".join(lines[: len(lines) // 2]), "resume the recorded search"),
    ):
        recording.write_text(content)
        target.unlink(missing_ok=True)
        with pytest.raises(SearchError, match=message):
            await replay(recording, target, search.data.folder)


# ---- failures ----


@pytest.mark.parametrize(
    ("reply", "count", "reason"),
    [
        (None, 9, "the endpoint is down"),
        ("no \ud83d", 28, "no JSON object"),
    ],  # a round after 25
)
async def test_a_model_that_writes_nothing_valid_ends_the_search(
    reply: str | None, count: int, reason: str, search: Searches
) -> None:
    rounds, per_round = (3, 3) if reply is None else (20, 4)
    with pytest.raises(NothingMeasured, match="no candidate was evaluated"):
        await search([reply], rounds=rounds, per_round=per_round)
    trials = search.records(TrialRecord)
    assert len(trials) == count and {trial.status for trial in trials} == {"invalid"}
    assert all(reason in trial.reason for trial in trials)
    gives_up = (
        search.lines[-1] == "gives up: the last 25 candidates were invalid or unsafe"
    )
    assert gives_up == (count > 25)
    written = {record.text for record in search.records(ReplyRecord)}
    assert written == ({"no ?"} if reply else {None}), "half a character is recorded"
    winner = await search([reply], ledger="plus", strategy="autoprune+")
    assert winner.test.gain.low > 0, "it proposes by other means as well"


@pytest.mark.parametrize("reason", ["cannot identify", "not finite"])
async def test_a_failed_evaluation_is_not_scored_as_wrong(
    reason: str, search: Searches
) -> None:
    best = (await search(ledger="free")).digest

    def undefined(job: EvaluationJob, answers: Answers) -> Answers:
        value = float("nan") if digest_of(job) == best else answers.logprob[0]
        return Answers((value, *answers.logprob[1:]), answers.right)

    change = undefined if reason == "not finite" else failing(best)
    assert (await search(change=change)).digest != best
    trials = search.records(TrialRecord)
    failed = [trial for trial in trials if trial.status == "unevaluated"]
    assert failed and {trial.objective for trial in failed} == {None}
    assert all(reason in trial.reason for trial in failed)


async def test_a_candidate_that_fails_during_a_race_has_no_score(
    search: Searches,
) -> None:
    best = (await search(ledger="free", strategy="autoprune+")).digest

    def fail_later(job: EvaluationJob, answers: Answers) -> Answers:
        if digest_of(job) == best and job.split == "search" and job.start:
            raise EvaluationFailed.of("image", "cannot identify image file")
        return answers

    await search(strategy="autoprune+", change=fail_later)
    trials = search.records(TrialRecord)
    failed = [trial for trial in trials if trial.status == "unevaluated"]
    assert any(trial.examples for trial in failed), "it answered a part"
    assert {(trial.objective, trial.accuracy) for trial in failed} == {(None, None)}


@pytest.mark.parametrize("per_round", [1, 2])
async def test_duplicates_of_a_failed_candidate_are_evaluated_later(
    per_round: int, search: Searches
) -> None:
    body = json.loads(PAPER)
    body["scoring"]["signals"].append({"atom": "local_detail_energy", "weight": 0.0})
    duplicate = json.dumps(body)
    in_round: list[tuple[str, str, str]] = [(duplicate, "same", "1.0")] * (
        per_round - 1
    )
    expected = [
        (PAPER, "unevaluated", ""),
        *in_round,
        (duplicate, "evaluated", ""),
        (PAPER, "same", "2.0"),
    ]
    proposer = ScriptedProposer([text for text, *_ in expected], in_order=True)
    change = failing(paper_state(settings_of()).digest)
    await search(
        proposer, change=change, rounds=len(expected) // per_round, per_round=per_round
    )
    trials = search.records(TrialRecord)
    assert [(trial.status, trial.same_as) for trial in trials] == [
        row[1:] for row in expected
    ]


@pytest.mark.parametrize("split", ["search", "validation", "test"])
@pytest.mark.parametrize("baseline", ["full", BASE.digest], ids=["unpruned", "base"])
async def test_a_baseline_that_fails_ends_the_search_at_its_start_and_can_be_resumed(
    baseline: str, split: str, search: Searches
) -> None:
    with pytest.raises(
        SearchError, match=f"the {split} split: .*cannot identify.* -> "
    ):
        await search(change=failing(baseline, [split]))
    assert not search.records(TrialRecord)
    await search()
    assert search.records(WinnerRecord)


async def test_a_winner_that_cannot_be_measured_on_the_test_split_is_replaced(
    search: Searches,
) -> None:
    free = await search(ledger="free")
    winner = await search(change=failing(free.digest, ["test"]))
    assert winner.estimates == free.estimates
    assert (
        winner.winner == sorted(free.gains, key=lambda name: -free.gains[name].low)[1]
    )
