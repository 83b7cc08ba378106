from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

from benchmarks.search.candidate_table import as_markdown
from offline_search.ledger import read_ledger
from offline_search.report import read_report
from offline_search.settings import Settings
from tests.offline_search.replies import valid_replies
from tests.offline_search.synthetic import SyntheticEvaluator, dataset, run_search


def test_candidates_are_counted_by_search_and_by_proposer(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = dataset(tmp_path / "data")
    paths = [tmp_path / f"autoprune-{seed}.jsonl" for seed in range(2)]
    for seed, path in enumerate(paths):
        settings = Settings(
            strategy="autoprune", rounds=2, per_round=3, budgets=(8,), seed=seed, proposer="m"
        )
        replies = [*valid_replies(5), "no proposal"]
        asyncio.run(run_search(path, settings, SyntheticEvaluator(data), replies))
    text = as_markdown(paths)
    rows = [row for path in paths for row in read_report(read_ledger(path)).rows]
    valid = sum(row.result.status not in ("invalid", "unsafe") for row in rows)
    scores = [row.objective for row in rows if row.objective is not None]
    line = next(line for line in text.splitlines() if line.startswith("| m |"))
    expected = ["m", "2", "12", str(valid), str(len(scores)), f"{max(scores):.3f}",
                f"{statistics.mean(scores):.3f}", f"{min(scores):.3f}",
                f"{statistics.stdev(scores):.3f}"]  # fmt: skip
    assert [cell.strip() for cell in line.strip("|").split("|")] == expected
    assert 0 < valid < 12 and text.count("| autoprune-") == 2
