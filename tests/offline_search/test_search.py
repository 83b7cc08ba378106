from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from offline_search.answers import Answers
from offline_search.evaluators.protocol import Job
from offline_search.examples import Dataset
from offline_search.ledger import Ledger, read
from offline_search.proposal import alpha
from offline_search.proposers.asking import Limits
from offline_search.records import Chosen, Judged, Proposed, Replied, Summarized, Tried
from offline_search.replay import replay
from offline_search.search import Search
from offline_search.settings import Settings
from offline_search.strategies import STRATEGIES
from offline_search.strategies.starts import base_state, paper_state
from tests.offline_search.replies import HOSTILE, sound
from tests.offline_search.synthetic import ScriptedProposer, SyntheticEvaluator
from vllm_autoprune import load_state
from vllm_autoprune.errors import SearchError

SOUND = sound(30)


async def searched(
    path: Path,
    settings: Settings,
    evaluator: SyntheticEvaluator,
    replies: Sequence[str | None] | None = None,
    limits: Limits | None = None,
) -> Chosen:
    """One search on a ledger, from wherever the ledger is."""
    proposer = ScriptedProposer(SOUND if replies is None else replies)
    settings = settings.model_copy(update={"evaluator": evaluator.name})
    with Ledger(path) as ledger:
        return await Search(settings, ledger, evaluator, proposer, limits or Limits()).run()


def digest(path: Path) -> str:
    with Ledger(path) as ledger:
        return ledger.digest()


def of_kind(path: Path, kind: type) -> list[object]:
    return [record for record in read(path) if isinstance(record, kind)]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_every_strategy_finds_a_state_that_loads(
    strategy: str, settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"strategy": strategy})
    chosen = await searched(tmp_path / "l", settings, SyntheticEvaluator(data))
    state = load_state(json.dumps(chosen.state))
    assert state.digest == chosen.digest
    assert state.base_policy.name == settings.base_policy
    assert state.provenance.scores["test"] == chosen.test.model_dump(mode="json")
    assert 1 <= len(chosen.confirmed) <= settings.confirmed
    assert chosen.test.gain.low <= chosen.test.gain.value <= chosen.test.gain.high


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_search_that_is_run_again_does_nothing_again(
    strategy: str, settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"strategy": strategy})
    evaluator = SyntheticEvaluator(data)
    first = await searched(tmp_path / "l", settings, evaluator)
    before, asked = (tmp_path / "l").read_bytes(), len(evaluator.asked)
    assert await searched(tmp_path / "l", settings, evaluator, []) == first
    assert (tmp_path / "l").read_bytes() == before and len(evaluator.asked) == asked


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_from_any_prefix_of_its_ledger_a_search_ends_the_same(
    strategy: str, settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"strategy": strategy, "rounds": 2})
    await searched(tmp_path / "whole", settings, SyntheticEvaluator(data))
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    for end in range(0, len(lines), max(1, len(lines) // 6)):
        part = tmp_path / f"part-{end}"
        part.write_bytes(b"".join(lines[:end]) + lines[end][: len(lines[end]) // 2])
        evaluator = SyntheticEvaluator(data)
        await searched(part, settings, evaluator)
        assert digest(part) == digest(tmp_path / "whole")
        kept = [json.loads(line) for line in lines[:end]]
        known = {(r["digest"], r["split"], r["start"]) for r in kept if r["kind"] == "evaluation"}
        for job in evaluator.asked:
            digest_ = "full" if job.state is None else job.state.digest
            assert (digest_, job.split, job.start) not in known, "measured again"


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_recorded_search_replays_without_anybody(
    strategy: str, settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"strategy": strategy})
    replies = [*SOUND[:5], HOSTILE["prose"], None]
    chosen = await searched(tmp_path / "l", settings, SyntheticEvaluator(data), replies)
    again, before, after = await replay(tmp_path / "l", tmp_path / "replayed", data)
    assert before == after
    assert again.digest == chosen.digest and again.test == chosen.test


async def test_a_recording_that_is_not_whole_is_told(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    await searched(tmp_path / "l", settings, SyntheticEvaluator(data))
    lines = (tmp_path / "l").read_bytes().splitlines(keepends=True)
    (tmp_path / "l").write_bytes(b"".join(lines[: len(lines) // 2]))
    with pytest.raises(SearchError, match="resume the recorded search"):
        await replay(tmp_path / "l", tmp_path / "replayed", data)


async def test_a_changed_recording_does_not_replay(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    await searched(tmp_path / "l", settings, SyntheticEvaluator(data))
    first = next(r for r in read(tmp_path / "l") if isinstance(r, Replied) and r.text)
    changed = sound(31)[-1]
    assert first.text
    old, new = json.dumps(first.text)[1:-1], json.dumps(changed)[1:-1]
    text = (tmp_path / "l").read_text().replace(old, new)
    (tmp_path / "l").write_text(text)
    with pytest.raises(SearchError):
        await replay(tmp_path / "l", tmp_path / "replayed", data)


async def test_every_step_of_the_algorithm_is_a_record(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    await searched(tmp_path / "l", settings, SyntheticEvaluator(data))
    rounds, each = settings.rounds, settings.per_round
    for kind, number in ((Proposed, rounds * each), (Tried, rounds * each), (Summarized, rounds)):
        assert len(of_kind(tmp_path / "l", kind)) == number
    assert len(of_kind(tmp_path / "l", Replied)) >= rounds * each
    assert of_kind(tmp_path / "l", Judged) and of_kind(tmp_path / "l", Chosen)


async def test_the_same_behaviour_is_measured_once(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    paper = json.dumps(alpha(paper_state(settings)))
    spaced = json.dumps(json.loads(paper), indent=3)
    evaluator = SyntheticEvaluator(data)
    await searched(tmp_path / "l", settings, evaluator, [paper, spaced])
    trials = [r for r in of_kind(tmp_path / "l", Tried) if isinstance(r, Tried)]
    assert [trial.status for trial in trials].count("evaluated") == 1
    assert {trial.same_as for trial in trials if trial.status == "same"} == {"1.0"}
    measured = [job for job in evaluator.asked if job.split == "search"]
    assert len(measured) == 3, "all tokens, the base policy, and the one candidate"


async def test_states_that_keep_the_same_tokens_are_the_same_where_probes_tell(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    # No exchange: whatever the signals are, the base policy decides.
    other = alpha(base_state(settings))
    scoring = other["scoring"]
    assert isinstance(scoring, dict)
    scoring["signals"] = [{"atom": "local_detail_energy", "weight": 2.0}]
    better = json.dumps(alpha(paper_state(settings, quota=4)))
    for probes, status in ((True, "same"), (False, "evaluated")):
        path = tmp_path / str(probes)
        evaluator = SyntheticEvaluator(data, probes=probes)
        await searched(path, settings, evaluator, [json.dumps(other), better])
        found = {
            trial.same_as or trial.status
            for trial, made in zip(of_kind(path, Tried), of_kind(path, Proposed), strict=True)
            if isinstance(trial, Tried) and isinstance(made, Proposed)
            and made.state is not None and "local_detail_energy" in json.dumps(made.state)
        }  # fmt: skip
        assert ("base" in found) == (status == "same"), found


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_replies_are_invalid_proposals_and_the_search_goes_on(
    name: str, settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"rounds": 2, "per_round": 4})
    replies = [HOSTILE[name], SOUND[0], HOSTILE[name], SOUND[1], SOUND[2]]
    await searched(tmp_path / "l", settings, SyntheticEvaluator(data), replies)
    trials = [r for r in of_kind(tmp_path / "l", Tried) if isinstance(r, Tried)]
    assert len(trials) == 8 and "evaluated" in {trial.status for trial in trials}
    for trial in trials:
        assert trial.status != "invalid" or trial.reason
    assert (tmp_path / "l").stat().st_size < 2_000_000


async def test_an_endpoint_that_is_down_all_the_time(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(SearchError, match="no candidate was evaluated"):
        await searched(tmp_path / "l", settings, SyntheticEvaluator(data), [None])
    trials = [r for r in of_kind(tmp_path / "l", Tried) if isinstance(r, Tried)]
    assert {trial.status for trial in trials} == {"invalid"}
    assert all("the endpoint is down" in trial.reason for trial in trials)


async def test_autoprune_plus_needs_no_endpoint_to_go_on(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"strategy": "autoprune+"})
    chosen = await searched(tmp_path / "l", settings, SyntheticEvaluator(data), [None])
    assert chosen.test.gain.low > 0


async def test_a_candidate_that_cannot_be_measured_is_not_a_wrong_one(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"per_round": 1, "rounds": 4})
    evaluator = SyntheticEvaluator(data)
    await searched(tmp_path / "free", settings, evaluator)
    best = next(r for r in read(tmp_path / "free") if isinstance(r, Chosen))
    evaluator = SyntheticEvaluator(data)
    evaluator.fails = {best.digest}
    other = await searched(tmp_path / "l", settings, evaluator)
    assert other.digest != best.digest
    failed = [r for r in of_kind(tmp_path / "l", Tried)
              if isinstance(r, Tried) and r.status == "unevaluated"]  # fmt: skip
    assert failed and all(r.objective is None and "500" in r.reason for r in failed)


async def test_what_could_not_be_measured_is_tried_again_in_another_form(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    # Two states of one behaviour: signals are idle where nothing is exchanged for quality.
    one = alpha(paper_state(settings))
    other = json.loads(json.dumps(one))
    other["scoring"]["signals"].append({"atom": "local_detail_energy", "weight": 0.0})
    settings = settings.model_copy(update={"per_round": 1, "rounds": 8})
    replies = [json.dumps(one), json.dumps(other)]
    await searched(tmp_path / "free", settings, SyntheticEvaluator(data), replies)
    first = of_kind(tmp_path / "free", Proposed)[0]
    assert isinstance(first, Proposed)
    evaluator = SyntheticEvaluator(data)
    evaluator.fails = {first.digest}
    await searched(tmp_path / "l", settings, evaluator, replies)
    trials = [r for r in of_kind(tmp_path / "l", Tried) if isinstance(r, Tried)]
    assert {"unevaluated", "evaluated"} <= {trial.status for trial in trials}


async def test_budgets_of_tokens_and_money_end_the_asking(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    for limits in (Limits(tokens=400), Limits(money=0.025)):
        path = tmp_path / str(limits.tokens)
        await searched(path, settings, SyntheticEvaluator(data), limits=limits)
        replies = [r for r in of_kind(path, Replied) if isinstance(r, Replied)]
        spent = [r for r in replies if "is spent" in r.failure]
        assert spent and sum(r.cost.money for r in spent) == 0
        # One round is asked at once, so it may go over by what it had in flight.
        assert len(replies) - len(spent) <= settings.per_round * 2


async def test_a_ledger_of_another_search_is_refused_and_says_why(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    await searched(tmp_path / "l", settings, SyntheticEvaluator(data))
    other = settings.model_copy(update={"rounds": 7, "seed": 3})
    with pytest.raises(SearchError, match=r"rounds is 7, was 3.*seed is 3, was 0"):
        await searched(tmp_path / "l", other, SyntheticEvaluator(data))


@pytest.mark.parametrize("across", ["mean", "worst"])
async def test_several_budgets_are_one_objective(
    across: str, settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"budgets": (8, 4), "across": across})
    evaluator = SyntheticEvaluator(data)
    await searched(tmp_path / "l", settings, evaluator)
    asked = {(job.state.digest, job.budget) for job in evaluator.asked if job.state is not None}
    assert {budget for _, budget in asked} == {8, 4}
    trials = [r for r in of_kind(tmp_path / "l", Tried) if isinstance(r, Tried)]
    evaluated = [trial for trial in trials if trial.status == "evaluated"]
    assert all(trial.examples == 2 * len(data.of("search")) for trial in evaluated)


async def test_a_race_spends_less_on_losers_and_no_more_in_all(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"strategy": "autoprune+", "rounds": 4})
    await searched(tmp_path / "l", settings, SyntheticEvaluator(data))
    trials = [r for r in of_kind(tmp_path / "l", Tried) if isinstance(r, Tried)]
    size = len(data.of("search"))
    dropped = [trial for trial in trials if trial.status == "dropped"]
    assert dropped and all(trial.examples < size for trial in dropped)
    # The last round may go over by what it had in flight.
    assert sum(t.examples for t in trials) <= (settings.candidates + settings.per_round) * size


async def test_winners_are_chosen_where_they_were_not_found(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    evaluator = SyntheticEvaluator(data)
    chosen = await searched(tmp_path / "l", settings, evaluator)
    best = max(chosen.estimates, key=lambda name: chosen.estimates[name])
    assert chosen.winner == best
    tried = {
        f"{r.round}.{r.index}": r for r in of_kind(tmp_path / "l", Tried) if isinstance(r, Tried)
    }
    found, seen = len(data.of("search")), len(data.of("validation"))
    for name, validation in chosen.confirmed.items():
        both = found * (tried[name].objective or 0) + seen * validation.objective.value
        assert chosen.estimates[name] == pytest.approx(both / (found + seen), abs=1e-5)
    tested = {job.state.digest for job in evaluator.asked if job.split == "test" and job.state}
    assert tested == {chosen.digest, base_state(settings).digest}


async def test_the_worst_budget_counts_where_winners_are_measured_too(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    class Starved(SyntheticEvaluator):
        async def evaluate(self, job: Job) -> Answers:
            found = await super().evaluate(job)
            lost = 0.5 if job.state is not None and job.budget == 4 else 0.0
            return Answers(tuple(value - lost for value in found.logprob), found.right)

    worst = settings.model_copy(update={"budgets": (8, 4), "across": "worst"})
    chosen = await searched(tmp_path / "worst", worst, Starved(data))
    mean = await searched(
        tmp_path / "mean", worst.model_copy(update={"across": "mean"}), Starved(data)
    )
    lost = mean.base.objective.value - chosen.base.objective.value
    assert lost == pytest.approx(0.25, abs=0.01)
