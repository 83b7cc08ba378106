"""Reports on a search, finished or running, and the progress that it prints."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from pathlib import Path

import pytest

from offline_search.candidates import base_state
from offline_search.evaluator import EvaluationJob
from offline_search.history import Answers, History
from offline_search.ledger import Cost, read_ledger
from offline_search.report import ProgressLog, read_report
from offline_search.search import NothingMeasured
from tests.offline_search.synthetic import (
    BUDGET,
    HOSTILE,
    VALID_REPLIES,
    Searches,
    SyntheticEvaluator,
    dataset,
    digest_of,
    settings_of,
    trial,
)
from vllm_autoprune import load_state
from vllm_autoprune.errors import SearchError
from vllm_autoprune.statistics import Estimate

SCRIPT_TAG = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search with valid, invalid, hostile and failed replies."""
    folder = tmp_path_factory.mktemp("report")
    search = Searches(dataset(folder / "data"), folder)
    evaluator = SyntheticEvaluator(search.data)
    evaluator.name = SCRIPT_TAG
    replies = [*VALID_REPLIES[:4], HOSTILE["script"], None, HOSTILE["unknown atom"]]
    asyncio.run(search(replies, evaluator, strategy="autoprune+", rounds=4))
    return search.path


async def test_a_report_has_the_result_and_what_it_cost(ledger: Path) -> None:
    report = read_report(read_ledger(ledger))
    winner = report.winner
    assert winner is not None and 0 < report.duration < 600
    text = report.document().render_markdown()
    assert f"Candidate {winner.winner} won" in text
    assert f"The whole search: {report.duration:,.0f} s." in text
    gain = winner.test.gain
    digits = gain.count_decimals()
    figures = [f"{value:+.{digits}f}" for value in (gain.value, gain.low, gain.high)]
    assert (
        f"| gain over the base policy, paired | {figures[0]} ({figures[1]} to {figures[2]}) |"
        in text
    )
    written = sum(reply.text is not None for reply in report.replies)
    tokens = f"{100 * written:,} prompt and {50 * written:,} completion tokens"
    assert f"{tokens}, at a price" in text
    assert "## How sure the search is" in text and "Not known to be worse:" in text


async def test_a_report_has_what_decided_side_by_side(ledger: Path) -> None:
    report = read_report(read_ledger(ledger))
    winner = report.winner
    assert winner is not None and report.base_objective is not None
    text = report.document().render_markdown()
    (row,) = (row for row in report.trials if row.name == winner.winner)
    validation = winner.confirmed[winner.winner].objective
    test = winner.test.objective
    assert (
        f"| {winner.winner} (winner) | {row.result.score:+.4f} | {validation.value:+.4f} "
        f"({validation.low:+.4f} to {validation.high:+.4f}) | "
        f"{winner.estimates[winner.winner]:+.4f} | {test.value:+.4f} ("
    ) in text
    assert f"| base policy | {report.base_objective:+.4f} |" in text


async def test_a_report_lists_candidates_in_words_for_readers(ledger: Path) -> None:
    report = read_report(read_ledger(ledger))
    assert sum(report.statuses.values()) == len(report.trials)
    best = [value for _, value in report.curve()]
    assert best == sorted(best) and best[-1] == report.ranked[0].result.score
    text = report.document().render_markdown()
    assert f"| {report.ranked[0].name} | {best[-1]:+.4f} |" in text
    assert " stopped early" in text
    assert " with the same tokens as an earlier one" in text
    assert not re.search(r"dropped|\btpe\b|★|->", text.partition("## Candidates")[0])
    page = report.document().render_html()
    assert page.startswith("<!doctype html>") and "<script" not in page
    assert "&lt;script&gt;" in page


async def test_a_search_that_runs_or_gave_up_can_be_reported(
    ledger: Path, search: Searches, tmp_path: Path
) -> None:
    part = tmp_path / "part.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    for end in (1, 5, len(lines) // 2, len(lines) - 1):
        part.write_bytes(b"".join(lines[:end]) + b'{"kind": "pro')
        report = read_report(read_ledger(part))
        text = report.document().render_markdown()
        assert "has not ended" in text and ("Best on" in text) == bool(report.trials)
    part.write_bytes(b"")
    with pytest.raises(SearchError, match="ledger: is empty"):
        read_report(read_ledger(part))
    with pytest.raises(NothingMeasured):
        await search(["no"], ledger="none", rounds=20, per_round=5)
    text = read_report(read_ledger(search.path)).document().render_markdown()
    assert "gave up: the last 25 were invalid or unsafe." in text
    assert "invalid: /: the reply holds no JSON object" in text, "the reason"


def test_progress_shows_share_best_and_remaining_time() -> None:
    lines: list[str] = []
    now = iter([0.0, 10.0, 10.0, 70.0, 70.0])
    progress = ProgressLog(lines.append, lambda: next(now))
    history = History(trial("0.0", [-0.2] * 2))
    progress.on_start(history, 24)
    history.trials += [
        trial("1.0", [-0.1]),
        trial("1.1", status="invalid", reason="no such atom"),
    ]
    progress.on_round(history.trials, history, 0.25, Cost(prompt_tokens=9))
    assert lines[0] == "base policy -0.2000 on 24 questions (10 s)"
    leader = "1.0 by llm leads on the search split, -0.1000"
    assert f"25% round 1: 1 evaluated, 1 invalid; {leader}" in lines[1]
    assert "3 min left" in lines[1] and "no such atom" in lines[2]
    history.trials[0] = trial("1.0", [-0.3])
    progress.on_round(history.trials, history, 0.25, Cost())
    behind = (
        "the base policy leads on the search split, -0.2000; 1.0 by llm has -0.3000"
    )
    assert f"{behind}, 3 min left" in lines[3]


async def test_a_report_says_which_rule_chose_the_winner(ledger: Path) -> None:
    report = read_report(read_ledger(ledger))
    winner = report.winner
    assert winner is not None
    name = winner.winner
    plain = report.document().render_markdown()
    assert f"{name} has the best lower bound of its gain, " in plain
    assert "is simpler" not in plain
    rival = next(other for other in winner.gains if other != name)
    gains = {**winner.gains, rival: Estimate(9.0, 8.5, 9.5)}
    changed = winner.model_copy(update={"gains": gains})
    text = dataclasses.replace(report, winner=changed).document().render_markdown()
    assert f"{rival} has the best lower bound of its gain, +8.5" in text
    assert f"but is tied with {name}, which is simpler" in text
    # Bounds decide: in the table beside them the winner need not lead on both splits together.
    changed = winner.model_copy(update={"winner": rival})
    text = dataclasses.replace(report, winner=changed).document().render_markdown()
    assert f"\n- On the search split alone {name} was the best.\n" in text


@pytest.mark.parametrize("positions", ["true", "packed"])
async def test_a_winner_behind_its_base_policy_says_how_to_serve_that(
    positions: str, search: Searches
) -> None:
    def lose(job: EvaluationJob, answers: Answers) -> Answers:
        is_candidate = digest_of(job) not in ("full", base.digest)
        loss = -0.3 * is_candidate
        return Answers((loss,) * len(answers), answers.right)

    base = base_state(settings_of(positions=positions))
    winner = await search(change=lose, positions=positions)
    assert (winner.test.gain.value, winner.gains[winner.winner].value) == (-0.3, -0.3)
    notes = str(load_state(winner.state).provenance.notes)
    gain = "behind by 0.300 (0.300 to 0.300)"
    assert f"cdpruner alone: {gain} on validation, {gain} on test." in notes
    flags = f"--autoprune-state cdpruner --autoprune-budget {BUDGET}"
    if positions == "packed":
        flags += " --autoprune-positions packed"
    assert search.lines[-1].endswith(f"serve it, by vllm serve with {flags}")
    report = read_report(read_ledger(search.path)).document()
    assert report.answer.endswith(f"{search.lines[-1]}.")


async def test_a_winner_ahead_of_its_base_policy_is_offered_alone(
    search: Searches,
) -> None:
    base = base_state(settings_of()).digest

    def gain(job: EvaluationJob, answers: Answers) -> Answers:
        return Answers((-0.3 * (digest_of(job) == base),) * len(answers), answers.right)

    winner = await search(change=gain)
    notes = str(load_state(winner.state).provenance.notes)
    assert "cdpruner alone: ahead by 0.300 (0.300 to 0.300) on validation" in notes
    assert search.lines[-1].startswith("winner ")


async def test_a_winner_that_is_level_with_its_base_policy_says_so(
    search: Searches,
) -> None:
    winner = await search(
        change=lambda _, answers: Answers((-0.1,) * len(answers), answers.right)
    )
    assert winner.test.gain.value == 0
    assert search.lines[-1] == "No gain is shown: cdpruner alone may do as well"


async def test_a_report_compares_finalists_on_one_scale(search: Searches) -> None:
    """Each round had other questions: the table has estimates for all of them."""
    await search(rounds=4, block=8)
    report = read_report(read_ledger(search.path))
    winner = report.winner
    assert winner is not None and {*winner.confirmed, "base"} < set(winner.searched)
    objectives = {trial.name: trial.result.objective for trial in report.trials}
    assert any(objectives[name] != winner.searched[name] for name in winner.confirmed)
    text = report.document().render_markdown()
    for name in winner.confirmed:
        (score,) = report._format(winner.searched[name])
        assert re.search(rf"\| {name}( \(winner\))? \| {re.escape(score)} \|", text)
    ranked = [winner.searched[trial.name] for trial in report.ranked]
    assert ranked == sorted(ranked, reverse=True), "of all candidates on one scale"
