"""Figures of the search study are those of the results that the repository holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.search.results import read_confirmation, read_results
from benchmarks.search.tables import format_mean

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/studies/search.md").read_text(encoding="utf-8")
RECORDED = ROOT / "benchmarks/search/recorded/study"
CELLS = sorted(folder.name for folder in RECORDED.iterdir())
SEARCHES = [
    (cell, strategy)
    for cell in CELLS
    for strategy in ("random", "tpe", "autoprune+@none")
    if f"{strategy}-0" in read_results(RECORDED / cell)
]


@pytest.mark.parametrize("cell", CELLS)
def test_recorded_winners_are_those_that_were_confirmed(cell: str) -> None:
    results, confirmed = read_results(RECORDED / cell), read_confirmation(RECORDED / cell)
    winners = {name: result.winner for name, result in results.items() if result.winner}
    assert set(winners) == set(confirmed)
    for name, winner in winners.items():
        assert winner.load().digest == winner.digest == confirmed[name].digest
        assert confirmed[name].questions == 600


@pytest.mark.parametrize(("cell", "strategy"), SEARCHES)
def test_every_search_has_its_row(cell: str, strategy: str) -> None:
    confirmed = read_confirmation(RECORDED / cell)
    scores, others = ([confirmed[f"{name}-{seed}"] for seed in range(8)]
                      for name in (strategy, "tpe"))  # fmt: skip
    objective = format_mean([score.objective for score in scores], 2)
    accuracy = format_mean([100 * score.accuracy for score in scores], 1)
    gaps = [score.objective - other.objective for score, other in zip(scores, others, strict=True)]
    gap = "-" if strategy == "tpe" else f"{'+' if sum(gaps) > 0 else ''}{format_mean(gaps, 2)}"
    name = strategy.removesuffix("@none")
    assert f"| `{name}` | {objective} | {accuracy} | {gap} |" in PAGE


def test_every_row_has_its_search() -> None:
    rows = re.findall(r"\| `[a-z+]+` \| -[\d.]+ ± [\d.]+ \|", PAGE)
    assert len(rows) == len(SEARCHES)
