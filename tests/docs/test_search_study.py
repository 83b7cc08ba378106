"""Figures of the search study are those of the results that the repository holds."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.search.comparison_table import format_mean
from benchmarks.search.confirmation import read_confirmation
from benchmarks.search.results import read_results, results_of
from offline_search.strategies.ranking_skill import MAX_QUESTIONS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/studies/search.md").read_text(encoding="utf-8")
RECORDED = ROOT / "benchmarks/search/recorded/study"
CELLS = sorted(folder.name for folder in RECORDED.iterdir())
WITH_MODEL = [cell for cell in CELLS if "autoprune-0" in read_results(RECORDED / cell)]
"""Cells of which the searches are recorded in which the model writes candidates."""

SEARCHES = [
    (cell, arm)
    for cell in CELLS
    for arm in ("random", "tpe", "autoprune+@none")
    if f"{arm}-0" in read_results(RECORDED / cell)
]
"""Searches without a language model."""

NAMES = {"minillava": "mini-LLaVA", "miniqwen": "mini-Qwen3-VL"}
SEEDS = range(8)


def format_gap(gaps: Sequence[float]) -> str:
    return f"{'+' if statistics.mean(gaps) > 0 else ''}{format_mean(gaps, 2)}"


@pytest.mark.parametrize("strategy", ["autoprune", "evoprompting-states"])
@pytest.mark.parametrize("cell", WITH_MODEL)
def test_a_row_of_the_embedded_model_is_that_of_its_results(cell: str, strategy: str) -> None:
    yardstick, _, budget = cell.partition("-k")
    confirmed = read_confirmation(RECORDED / cell)
    results = results_of(read_results(RECORDED / cell), strategy, SEEDS)
    assert list(results) == list(SEEDS)
    scores = [confirmed[f"{strategy}-{seed}"] for seed in SEEDS]
    gaps = [
        score.objective - confirmed[f"tpe-{seed}"].objective
        for seed, score in zip(SEEDS, scores, strict=True)
    ]
    curves = zip(*(result.curve for result in results.values()), strict=True)
    means = [statistics.mean(value for value in best if value is not None) for best in curves]
    row = [
        NAMES[yardstick],
        budget,
        f"`{strategy}`",
        format_mean([score.objective for score in scores], 2),
        format_mean([100 * score.accuracy for score in scores], 1),
        format_gap(gaps),
        ", ".join(f"{mean:.2f}" for mean in means),
    ]
    assert f"| {' | '.join(row)} |" in PAGE


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


def test_the_model_that_ranks_showed_skill_in_as_many_searches_as_the_page_says() -> None:
    results = [
        (cell, result)
        for cell in CELLS
        for result in results_of(read_results(RECORDED / cell), "autoprune+", SEEDS).values()
    ]
    # Without skill it answers every question of the test, and nothing else.
    found = [cell for cell, result in results if result.replies != MAX_QUESTIONS]
    assert len(results) == 32 and found == ["miniqwen-k8"]
    assert "passed in one of 32 searches" in PAGE
    confirmed = read_confirmation(RECORDED / "miniqwen-k8")
    gaps = [
        confirmed[f"autoprune+-{seed}"].objective - confirmed[f"autoprune+@none-{seed}"].objective
        for seed in SEEDS
    ]
    assert f"mini-Qwen3-VL at K = 8, {format_gap(gaps)}." in PAGE.replace("\n", " ")


@pytest.mark.parametrize("cell", WITH_MODEL)
def test_replies_that_are_no_program_are_those_of_its_results(cell: str) -> None:
    yardstick, _, budget = cell.partition("-k")
    known, row = read_results(RECORDED / cell), [NAMES[yardstick], budget]
    # OpenEvolve measures the program that it starts from.
    for arm, measured in {
        "evoprompting-code": 0, "openevolve-states": 1, "openevolve-code": 1
    }.items():  # fmt: skip
        results = results_of(known, arm, SEEDS)
        assert list(results) == list(SEEDS)
        assert {one.candidates - one.invalid for one in results.values()} == {measured}
        row.append(str(sum(result.replies for result in results.values())))
    assert f"| {' | '.join(row)} |" in PAGE
