from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from offline_search.dataset import Dataset
from offline_search.evaluation.history import History, Trial
from offline_search.ledger import read_ledger
from offline_search.ledger.records import Cost, ProposalRecord, TrialRecord, WinnerRecord
from offline_search.proposers.prompt import summarize
from offline_search.report import as_html, as_markdown, read_report
from offline_search.report.progress import ProgressLog
from offline_search.settings import Settings
from tests.offline_search.replies import HOSTILE, valid_replies
from tests.offline_search.synthetic import SyntheticEvaluator, records_of_kind, run_search
from vllm_autoprune.errors import SearchError

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
    assert f"{chosen.test.gain.value:+.4g}" in text and f"{chosen.test.gain.low:+.4g}" in text
    assert "Proposer: " in text and "Evaluator: " in text
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|")
    assert sum(report.statuses.values()) == len(report.rows)
    assert report.cost.proposer.tokens > 0
    best = [value for _, value in report.curve()]
    assert best == sorted(best) and best[-1] == report.ranked[0].result.objective


async def test_the_page_is_self_contained_and_without_scripts(ledger: Path) -> None:
    page = as_html(read_report(read_ledger(ledger)))
    collector = TagCollector()
    collector.feed(page)
    assert not collector.tags & {"script", "link", "img", "iframe", "object"}
    assert not {name for name in collector.attributes if name.startswith("on")} | (
        collector.attributes & {"src", "href"}
    )
    assert "default-src 'none'" in page and SCRIPT_TAG not in page
    assert "&lt;script&gt;" in page
    for row in read_report(read_ledger(ledger)).rows:
        assert f"<summary>{row.name} " in page
    assert re.search(r"Against \d+\.\d+", page), "a candidate's difference to its parent"


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
    first, best = text.splitlines()[0], text.splitlines()[2]
    assert first.startswith("Base policy alone: -")
    top = read_report(read_ledger(ledger)).ranked[0].result.objective
    assert top is not None and best.startswith(f"- {1000 * top:+.0f}")
    assert "Best of each round" in text and len(text) < 8000
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
    assert "25% round 1: 1 evaluated, 1 invalid; best -0.1000 (1.0 by llm)" in lines[1]
    assert "3 min left" in lines[1] and "no such atom" in lines[2]
