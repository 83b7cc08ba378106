from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from offline_search.candidates import base_state
from offline_search.dataset import Dataset
from offline_search.evaluator import EvaluationJob
from offline_search.history import Answers, History, Trial
from offline_search.ledger import (
    Cost,
    Ledger,
    ProposalRecord,
    TrialRecord,
    WinnerRecord,
    read_ledger,
)
from offline_search.proposer import SpendingLimits
from offline_search.replay import replay
from offline_search.report import ProgressLog, as_markdown, describe_leader, read_report
from offline_search.report_page import as_html, draw_charts
from offline_search.search import Search
from offline_search.settings import Settings
from offline_search.summary import summarize
from tests.offline_search.synthetic import (
    HOSTILE,
    ScriptedProposer,
    SyntheticEvaluator,
    list_reply,
    records_of_kind,
    run_search,
    valid_replies,
)
from vllm_autoprune.errors import SearchError
from vllm_autoprune.statistics import count_decimals

SCRIPT_TAG = "<script>alert(1)</script>"


class TagCollector(HTMLParser):
    """Collects the names of all tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


@pytest.fixture
async def ledger(data: Dataset, settings: Settings, tmp_path: Path) -> Path:
    """A search with valid, invalid, hostile and failed replies."""
    path = tmp_path / "ledger.jsonl"
    evaluator = SyntheticEvaluator(data)
    evaluator.name = SCRIPT_TAG
    settings = settings.model_copy(update={"strategy": "autoprune+", "rounds": 4})
    replies = [*valid_replies(4), HOSTILE["script"], None, HOSTILE["unknown atom"]]
    await run_search(path, settings, evaluator, replies)
    return path


async def test_markdown_has_the_result_and_both_costs(ledger: Path) -> None:
    report = read_report(read_ledger(ledger))
    (chosen,) = records_of_kind(ledger, WinnerRecord)
    text = as_markdown(report)
    assert f"Winner: {chosen.winner}" in text
    gain = chosen.test.gain
    digits = count_decimals(gain.low, gain.high)
    assert f"| {gain.value:+.{digits}f} ({gain.low:+.{digits}f} to " in text
    assert "Proposer: " in text and "Evaluator: " in text
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|")
    assert sum(report.statuses.values()) == len(report.rows)
    assert report.cost.proposer.tokens > 0
    best = [value for _, value in report.curve()]
    assert best == sorted(best) and best[-1] == report.ranked[0].result.objective


async def test_the_page_is_self_contained_and_runs_no_script(ledger: Path) -> None:
    page = as_html(read_report(read_ledger(ledger)))
    collector = TagCollector()
    collector.feed(page)
    assert not collector.tags & {"link", "img", "iframe", "object"}
    assert not {name for name in collector.attributes if name.startswith("on") or name == "src"}
    assert "default-src 'none'" in page and "<script" not in page
    assert "&lt;script&gt;" in page
    assert all(link.startswith("#candidate-") for link in re.findall(r' href="([^"]+)"', page))
    for row in read_report(read_ledger(ledger)).rows:
        assert f'<details id="candidate-{row.name}"><summary>{row.name} ' in page
    assert re.search(r"Against \d+\.\d+", page), "a candidate's difference to its parent"


async def test_the_page_has_the_hypothesis_of_a_proposal(
    data: Dataset, settings: Settings, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"proposals_per_reply": 3, "rounds": 1})
    reply = list_reply(0, 3, hypothesis=f"It helps {SCRIPT_TAG}.")
    await run_search(tmp_path / "l", settings, SyntheticEvaluator(data), [reply])
    page = as_html(read_report(read_ledger(tmp_path / "l")))
    assert page.count("explore: It helps &lt;script&gt;") == 3 and SCRIPT_TAG not in page


def text_of(page: str) -> str:
    body = re.sub(r"<svg.*?</svg>|<script>.*?</script>", "", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body[body.index("<body>") :]).split())


async def test_the_page_says_who_won_and_why(ledger: Path) -> None:
    report = read_report(read_ledger(ledger))
    winner, text = report.winner, text_of(as_html(report))
    assert winner is not None
    answer = text[: text.index("Why this candidate")]
    assert f"Candidate {winner.winner} won" in answer and f"{winner.test.gain.value:+.4f}" in answer
    row = next(row for row in report.rows if row.name == winner.winner)
    own = winner.confirmed[winner.winner]
    objective, test = row.objective, winner.test.objective
    side_by_side = (
        f"{winner.winner} winner {objective:+.4f} {own.objective.value:+.4f} "
        f"{own.objective.low:+.4f} to {own.objective.high:+.4f} "
        f"{winner.estimates[winner.winner]:+.4f} {test.value:+.4f}"
    )
    assert side_by_side in text
    assert f"base policy {report.base_objective:+.4f}" in text


async def test_figures_have_the_digits_of_their_intervals(
    data: Dataset, settings: Settings, tmp_path: Path
) -> None:
    class Uncertain(SyntheticEvaluator):
        """Answers of pruned models that differ widely from image to image."""

        async def evaluate(self, job: EvaluationJob) -> Answers:
            answers = await super().evaluate(job)
            worst = -1 if job.candidate is None else int(job.candidate.digest[0], 16) % 4
            lost = [8.0 * (row // 2 % 4 == worst) for row in range(job.start, job.stop)]
            values = [value - loss for value, loss in zip(answers.logprob, lost, strict=True)]
            return Answers(tuple(values), answers.right)

    await run_search(tmp_path / "l", settings, Uncertain(data))
    text = text_of(as_html(read_report(read_ledger(tmp_path / "l"))))
    assert not re.search(r"[-+]\d\.\d{3}", text[: text.index("Candidates Best on")])
    assert text.count("Objective: mean log-probability") == 1
    assert re.search(r"[\d,]+ prompt and [\d,]+ completion tokens", text)


async def test_words_are_a_readers(ledger: Path) -> None:
    text = text_of(as_html(read_report(read_ledger(ledger))))
    assert " stopped early" in text and " with the same tokens as an earlier one" in text
    assert not re.search(r"dropped|\btpe\b|★|->", text)


def test_a_search_that_has_only_begun_has_no_empty_sections(ledger: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun.jsonl"
    begun.write_bytes(ledger.read_bytes().splitlines(keepends=True)[0])
    text = text_of(as_html(read_report(read_ledger(begun))))
    assert "Nothing has been measured yet." in text
    assert "Candidates" not in text and ": ." not in text


async def test_the_base_policy_is_measured_on_the_search_split(
    ledger: Path, data: Dataset, settings: Settings
) -> None:
    report = read_report(read_ledger(ledger))
    base = await SyntheticEvaluator(data).evaluate(
        EvaluationJob(base_state(report.settings), report.settings.budgets[0], "search", 0, 24)
    )
    full = await SyntheticEvaluator(data).evaluate(EvaluationJob(None, 0, "search", 0, 24))
    wanted = np.mean(np.subtract(base.logprob, full.logprob))
    assert report.base_objective == pytest.approx(wanted, abs=1e-6)
    assert f">base policy {report.base_objective:+.4f}</text>" in as_html(report)


async def test_charts_place_every_candidate_with_the_base_policy_on_every_split(
    ledger: Path,
) -> None:
    report = read_report(read_ledger(ledger))
    measured = [row for row in report.rows if row.result.objective is not None]
    progress, *_, finalists = draw_charts(report)
    marks = [mark for series in progress.series for mark in series.marks]
    assert sorted(mark.y for mark in marks) == sorted(row.result.objective or 0 for row in measured)
    assert {mark.link for mark in marks} == {f"#candidate-{row.name}" for row in measured}
    assert progress.y_label == finalists.y_label == "objective, nats"
    assert finalists.x_names == {1.0: "search", 2.0: "validation", 3.0: "test"}
    base = finalists.series[-1]
    assert base.name == "base policy" and [mark.x for mark in base.marks] == [1.0, 2.0, 3.0]
    assert finalists.side_by_side


async def test_a_search_and_its_replay_give_the_same_bytes(
    ledger: Path, data: Dataset, tmp_path: Path
) -> None:
    await replay(ledger, tmp_path / "again.jsonl", data)
    first, again = (
        as_html(read_report(read_ledger(p))) for p in (ledger, tmp_path / "again.jsonl")
    )
    assert first == again


async def test_a_running_search_can_be_reported(ledger: Path, tmp_path: Path) -> None:
    lines = ledger.read_bytes().splitlines(keepends=True)
    for end in (1, 5, len(lines) // 2, len(lines) - 1):
        part = tmp_path / "part.jsonl"
        part.write_bytes(b"".join(lines[:end]) + b'{"kind": "pro')
        report = read_report(read_ledger(part))
        assert "has not ended" in as_markdown(report) and "has not ended" in as_html(report)


def test_an_empty_ledger_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    with pytest.raises(SearchError, match="the ledger is empty"):
        read_report(read_ledger(path))
    with pytest.raises(SearchError):
        read_ledger(tmp_path / "none")


async def test_the_summary_lists_best_trend_and_failures(ledger: Path) -> None:
    text = next(r.text for r in reversed(read_ledger(ledger)) if r.kind == "summary")
    (chosen,) = records_of_kind(ledger, WinnerRecord)
    assert text.splitlines()[0].startswith("Base policy alone: -")
    best = read_report(read_ledger(ledger)).ranked[0]
    top = best.result.objective
    assert top is not None and f"- {best.name}: {1000 * top:+.0f}" in text
    assert "- digit: 12, " in text and "- colour: 12, " in text and len(text) < 8000
    assert chosen.winner


def test_the_summary_of_an_empty_history_is_the_base_policy() -> None:
    base = TrialRecord(round=0, index=0, status="evaluated", objective=-0.25)
    assert summarize(History(base, np.zeros(3))) == "Base policy alone: -250."


def test_repeated_failures_are_counted() -> None:
    base = TrialRecord(round=0, index=0, status="evaluated", objective=-0.25)
    history = History(base, np.zeros(3))
    for index in range(3):
        proposal = ProposalRecord(round=1, index=index, origin="llm", problems=("no such atom",))
        result = TrialRecord(round=1, index=index, status="invalid", reason="no such atom")
        history.trials.append(Trial(proposal, result))
    assert "- no such atom (3 times)" in summarize(history)


def test_progress_shows_share_best_and_remaining_time() -> None:
    lines: list[str] = []
    now = iter([0.0, 10.0, 10.0, 70.0])
    progress = ProgressLog(lines.append, lambda: next(now))
    history = History(
        TrialRecord(round=0, index=0, status="evaluated", objective=-0.2), np.zeros(2)
    )
    progress.on_start(history, 24)
    good = Trial(
        ProposalRecord(round=1, index=0, origin="llm"),
        TrialRecord(round=1, index=0, status="evaluated", objective=-0.1),
    )
    bad = Trial(
        ProposalRecord(round=1, index=1, origin="llm"),
        TrialRecord(round=1, index=1, status="invalid", reason="no such atom"),
    )
    history.trials += [good, bad]
    progress.on_round(1, [good, bad], history, 0.25, Cost(prompt_tokens=9))
    assert lines[0] == "base policy -0.2000 on 24 examples (10 s)"
    leader = "1.0 by llm leads on the search split, -0.1000"
    assert f"25% round 1: 1 evaluated, 1 invalid; {leader}" in lines[1]
    assert "3 min left" in lines[1] and "no such atom" in lines[2]


async def test_progress_and_final_word_name_the_same_winner(
    data: Dataset, settings: Settings, tmp_path: Path
) -> None:
    lines: list[str] = []
    settings = settings.model_copy(update={"rounds": 4})
    path = tmp_path / "l.jsonl"
    proposer, progress = ScriptedProposer(valid_replies(8)), ProgressLog(lines.append)
    with Ledger(path) as ledger:
        evaluator = SyntheticEvaluator(data)
        await Search(settings, ledger, evaluator, proposer, SpendingLimits(), progress).run()
    report = read_report(read_ledger(path))
    assert report.winner is not None
    leader = [line for line in lines if "leads on the search split" in line][-1]
    assert f"{report.ranked[0].name} by " in leader
    assert lines[-2].startswith(f"winner {report.winner.winner}: ")
    assert lines[-1] == describe_leader(report.winner, report.ranked[0].name)
    # Where validation chose another one, the last word says which, and why.
    other = describe_leader(report.winner, "9.9")
    assert other.startswith("On the search split alone 9.9 was better") and (
        f"{report.winner.winner} is" in other
    )
