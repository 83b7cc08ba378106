"""What rules for cells lose, on pictures that were drawn for it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.accuracy.cells import count_losses

RECORDED = Path(__file__).parents[3] / "docs/data/cells-lost.csv"


Losses = dict[tuple[str | int, str | int], dict[str, int]]


@pytest.fixture(scope="module")
def losses() -> Losses:
    """Counts of cells, by kind of picture and rule."""
    names = ("cells", "kept", "marks", "dropped", "dropped_of_one_colour")
    return {
        (kind, rule): dict(zip(names, map(int, counts), strict=True))
        for kind, rule, *counts in count_losses()
    }


def lossy(losses: Losses, rule: str) -> set[str | int]:
    """Kinds of pictures of which a rule loses marks."""
    rows = losses.items()
    return {kind for (kind, name), n in rows if name == rule and n["dropped"]}


def test_cells_of_one_colour_lose_only_marks_that_fill_cells(losses: Losses) -> None:
    kinds = {"bars of a chart", "board of 64 pixels a square"}
    assert lossy(losses, "flat") == kinds
    flat = [counts for (_, rule), counts in losses.items() if rule == "flat"]
    assert all(counts["dropped"] == counts["dropped_of_one_colour"] for counts in flat)


def test_predicted_cells_also_lose_marks_that_repeat_with_the_cells(
    losses: Losses,
) -> None:
    repeated = lossy(losses, "predicted") - lossy(losses, "flat")
    assert {"check boxes every 32 pixels", "dot leaders every 8 pixels"} <= repeated
    assert {"lines of one pixel", "screenshot", "screenshot scaled by 0.8"} <= repeated
    assert not {"check boxes every 40 pixels", "dot leaders every 7 pixels"} & repeated


def test_what_a_tolerance_takes_is_faint_not_small(losses: Losses) -> None:
    """Without one, noise of one level keeps everything."""
    flat = lossy(losses, "flat")
    assert lossy(losses, "flat:2") == flat
    assert lossy(losses, "flat:8") == {*flat, "watermark of 6 levels"}
    rules = ("flat", "predicted", "flat:2")
    noise = [losses["noise of one level", rule]["kept"] for rule in rules]
    assert noise == [750, 750, losses["text", "flat"]["kept"]]


def test_losses_are_those_of_the_page(losses: Losses) -> None:
    """Of pictures without glyphs and JPEG, which are a library's."""
    rows = list(csv.DictReader(RECORDED.read_text().splitlines()))
    assert [(row["kind"], row["rule"]) for row in rows] == [*losses]
    for row in rows:
        if row["kind"].startswith(("check boxes", "dot leaders", "lone", "bars")):
            counts = losses[row["kind"], row["rule"]]
            recorded = (int(row["marks"]), int(row["dropped"]))
            assert recorded == (counts["marks"], counts["dropped"])
