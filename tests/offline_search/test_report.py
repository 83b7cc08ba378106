from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from offline_search.candidates import base_state
from offline_search.dataset import Dataset
from offline_search.evaluator import EvaluationJob
from offline_search.history import Answers, History
from offline_search.ledger import Cost, Ledger, TrialRecord, read_ledger
from offline_search.proposer import SpendingLimits
from offline_search.replay import replay
from offline_search.report import SearchReport, as_html, as_markdown, describe_leader, read_report
from offline_search.search import ProgressLog, Search
from tests.offline_search.synthetic import (
    HOSTILE,
    ScriptedProposer,
    Searches,
    SyntheticEvaluator,
    list_reply,
    settings_of,
    trial,
    valid_replies,
)
from vllm_autoprune.errors import SearchError
from vllm_autoprune.statistics import count_decimals

SCRIPT_TAG = "<script>alert(1)</script>"


@pytest.fixture
async def ledger(search: Searches) -> Path:
    """A search with valid, invalid, hostile and failed replies."""
    evaluator = SyntheticEvaluator(search.data)
    evaluator.name = SCRIPT_TAG
    replies = [*valid_replies(4), HOSTILE["script"], None, HOSTILE["unknown atom"]]
    await search(replies, evaluator, strategy="autoprune+", rounds=4)
    return search.path


def text_of(page: str) -> str:
    body = re.sub(r"<svg.*?</svg>|<script>.*?</script>", "", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body[body.index("<body>") :]).split())


async def test_markdown_and_page_have_the_result(ledger: Path, data: Dataset) -> None:
    report = read_report(read_ledger(ledger))
    winner = report.winner
    assert winner is not None and sum(report.statuses.values()) == len(report.rows)
    best = [value for _, value in report.curve()]
    assert best == sorted(best) and best[-1] == report.ranked[0].objective

    text, gain = as_markdown(report), winner.test.gain
    digits = count_decimals(gain.low, gain.high)
    figures = [f"{value:+.{digits}f}" for value in (gain.value, gain.low, gain.high)]
    assert f"Candidate {winner.winner} won" in text and "Evaluator: " in text
    assert f"| {report.ranked[0].name} | {report.ranked[0].objective:+.4f} |" in text
    assert f"| gain, paired | {figures[0]} ({figures[1]} to {figures[2]}) |" in text
    written = sum(reply.text is not None for reply in report.replies)
    assert f"{100 * written:,} prompt and {50 * written:,} completion tokens, at a price" in text
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|")

    page = text_of(as_html(report))
    answer = page[: page.index("Why this candidate")]
    assert f"Candidate {winner.winner} won" in answer and f"{gain.value:+.4f}" in answer
    (row,) = (row for row in report.rows if row.name == winner.winner)
    validation, test = winner.confirmed[winner.winner].objective, winner.test.objective
    side_by_side = (
        f"{winner.winner} winner {row.objective:+.4f} {validation.value:+.4f} "
        f"{validation.low:+.4f} to {validation.high:+.4f} "
        f"{winner.estimates[winner.winner]:+.4f} {test.value:+.4f}"
    )
    assert side_by_side in page
    rivals = [name for name in winner.confirmed if name != winner.winner]
    assert all(re.search(rf"{name} [-+.\d ]+to [-+.\d ]+not measured", page) for name in rivals)
    # The words are a reader's.
    assert " stopped early" in page and " with the same tokens as an earlier one" in page
    assert not re.search(r"dropped|\btpe\b|★|->", page)

    # The base policy alone is measured on the search split.
    evaluator, base = SyntheticEvaluator(data), base_state(report.settings)
    pruned, full = (
        evaluator.answer(EvaluationJob(candidate, 8, "search", 0, 24)).logprob
        for candidate in (base, None)
    )
    mean = np.mean(np.subtract(pruned, full))
    assert report.base_objective == pytest.approx(mean, abs=1e-6)
    assert f"base policy {mean:+.4f}" in page and f">base policy {mean:+.4f}</" in as_html(report)


async def test_the_page_is_self_contained_and_runs_no_script(
    ledger: Path, data: Dataset, tmp_path: Path
) -> None:
    report = read_report(read_ledger(ledger))
    page = as_html(report)
    tags, attributes = set[str](), set[str]()

    class Collector(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.add(tag)
            attributes.update(name for name, _ in attrs)

    Collector().feed(page)
    assert not tags & {"link", "img", "iframe", "object"}
    assert not {name for name in attributes if name.startswith("on") or name == "src"}
    assert "default-src 'none'" in page and "<script" not in page and "&lt;script&gt;" in page
    # Each point of the chart leads to its candidate.
    names = {row.name for row in report.rows if row.result.objective is not None}
    links = set(re.findall(r' href="#candidate-([^"]+)"', page))
    assert names <= links and page.count(' href="') == page.count(' href="#candidate-')
    for row in report.rows:
        assert f'<details id="candidate-{row.name}"><summary>{row.name} ' in page
    assert re.search(r"Against \d+\.\d+", page), "a candidate's difference to its parent"
    await replay(ledger, tmp_path / "again.jsonl", data)
    assert as_html(read_report(read_ledger(tmp_path / "again.jsonl"))) == page


async def test_the_page_has_the_hypothesis_of_a_proposal(search: Searches) -> None:
    reply = list_reply(0, 3, hypothesis=f"It helps {SCRIPT_TAG}.")
    await search([reply], proposals_per_reply=3, rounds=1)
    page = as_html(read_report(read_ledger(search.path)))
    assert page.count("explore: It helps &lt;script&gt;") == 3 and SCRIPT_TAG not in page


async def test_figures_have_the_digits_of_their_intervals(search: Searches) -> None:
    class Uncertain(SyntheticEvaluator):
        """Answers of pruned models that differ widely from image to image."""

        def answer(self, job: EvaluationJob) -> Answers:
            answers = super().answer(job)
            worst = -1 if job.candidate is None else int(job.candidate.digest[0], 16) % 4
            lost = [8.0 * (row // 2 % 4 == worst) for row in range(job.start, job.stop)]
            values = [value - loss for value, loss in zip(answers.logprob, lost, strict=True)]
            return Answers(tuple(values), answers.right)

    await search((), Uncertain(search.data))
    text = text_of(as_html(read_report(read_ledger(search.path))))
    assert not re.search(r"[-+]\d\.\d{3}", text[: text.index("Every candidate")])
    assert text.count("Objective: mean log-probability") == 1


async def test_a_running_search_can_be_reported(ledger: Path, tmp_path: Path) -> None:
    def read_part(lines: list[bytes]) -> SearchReport:
        part = tmp_path / "part.jsonl"
        part.write_bytes(b"".join(lines) + b'{"kind": "pro')
        return read_report(read_ledger(part))

    lines = ledger.read_bytes().splitlines(keepends=True)
    for end in (1, 5, len(lines) // 2, len(lines) - 1):
        report = read_part(lines[:end])
        assert "has not ended" in as_markdown(report) and "has not ended" in as_html(report)
    text = text_of(as_html(read_part(lines[:1])))
    assert "Nothing has been measured yet." in text and "Candidates" not in text
    with pytest.raises(SearchError, match="the ledger is empty"):
        read_part([])


def test_progress_shows_share_best_and_remaining_time() -> None:
    lines: list[str] = []
    now = iter([0.0, 10.0, 10.0, 70.0])
    progress = ProgressLog(lines.append, lambda: next(now))
    base = TrialRecord(round=0, index=0, status="evaluated", objective=-0.2)
    history = History(base, np.zeros(2))
    progress.on_start(history, 24)
    history.trials.append(trial("1.0", [-0.1]))
    history.trials.append(trial("1.1", status="invalid", reason="no such atom"))
    progress.on_round(1, history.trials, history, 0.25, Cost(prompt_tokens=9))
    assert lines[0] == "base policy -0.2000 on 24 examples (10 s)"
    leader = "1.0 by llm leads on the search split, -0.1000"
    assert f"25% round 1: 1 evaluated, 1 invalid; {leader}" in lines[1]
    assert "3 min left" in lines[1] and "no such atom" in lines[2]


async def test_progress_and_last_line_name_the_same_winner(data: Dataset, tmp_path: Path) -> None:
    lines: list[str] = []
    evaluator, progress = SyntheticEvaluator(data), ProgressLog(lines.append)
    proposer, limits = ScriptedProposer(valid_replies(8)), SpendingLimits()
    with Ledger(tmp_path / "l") as ledger:
        await Search(settings_of(rounds=4), ledger, evaluator, proposer, limits, progress).run()
    report = read_report(read_ledger(tmp_path / "l"))
    assert report.winner is not None
    leader = [line for line in lines if "leads on the search split" in line][-1]
    assert f"{report.ranked[0].name} by " in leader
    assert lines[-2].startswith(f"winner {report.winner.winner}: ")
    assert lines[-1] == describe_leader(report.winner, report.ranked[0].name)
    # Where validation chose another one, the last line says which, and why.
    other = describe_leader(report.winner, "9.9")
    assert other.startswith("On the search split alone 9.9 was better")
    assert f"{report.winner.winner} is" in other
