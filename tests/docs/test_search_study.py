"""Figures of the search study are those of the results that the repository holds."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.search.results import read_confirmation, read_results, results_of
from benchmarks.search.tables import format_mean

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/studies/search.md").read_text(encoding="utf-8")
RECORDED = ROOT / "benchmarks/search/recorded/study"
CELLS = sorted(folder.name for folder in RECORDED.iterdir())

SEARCHES = [
    (cell, arm)
    for cell in CELLS
    for arm in ("random", "tpe", "autoprune+@none")
    if f"{arm}-0" in read_results(RECORDED / cell)
]
"""Searches without a language model."""

SEEDS = range(8)


def format_gap(gaps: Sequence[float]) -> str:
    return f"{'+' if statistics.mean(gaps) > 0 else ''}{format_mean(gaps, 2)}"


@pytest.mark.parametrize("cell", CELLS)
def test_recorded_winners_are_those_that_were_confirmed(cell: str) -> None:
    confirmed = read_confirmation(RECORDED / cell)
    winners = {
        name: result.winner
        for name, result in read_results(RECORDED / cell).items()
        if result.winner is not None
    }
    assert set(winners) == set(confirmed)
    for name, winner in winners.items():
        assert winner.load().digest == winner.digest == confirmed[name].digest
        assert confirmed[name].questions == 600


@pytest.mark.parametrize(("cell", "arm"), SEARCHES)
def test_the_rows_of_searches_without_a_model_are_those_of_their_results(
    cell: str, arm: str
) -> None:
    budget = cell.partition("-k")[2]
    confirmed = read_confirmation(RECORDED / cell)
    results = results_of(read_results(RECORDED / cell), arm, SEEDS)
    winners = [result.winner for result in results.values() if result.winner is not None]
    for scores in ([confirmed[f"{arm}-{seed}"] for seed in SEEDS], winners):
        objective = format_mean([score.objective for score in scores], 2)
        accuracy = format_mean([100 * score.accuracy for score in scores], 1)
        name = arm.removesuffix("@none")
        assert f"| {budget} | `{name}` | {objective} | {accuracy} |" in PAGE
    gaps = [
        confirmed[f"{arm}-{seed}"].objective - confirmed[f"tpe-{seed}"].objective for seed in SEEDS
    ]
    accuracy = format_mean([100 * confirmed[f"{arm}-{seed}"].accuracy for seed in SEEDS], 1)
    assert arm == "tpe" or f"| {accuracy} | {format_gap(gaps)} |" in PAGE


def test_every_row_of_a_strategy_has_its_searches() -> None:
    """Two tables of each cell, on 128 and on 600 questions."""
    rows = re.findall(r"^\| (?:8|16) \| `([a-z+]+)` \|", PAGE, flags=re.MULTILINE)
    assert Counter(rows) == Counter(2 * [arm.removesuffix("@none") for _, arm in SEARCHES])
