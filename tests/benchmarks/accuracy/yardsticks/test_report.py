from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from benchmarks.accuracy.yardsticks.cases import build_cases
from benchmarks.accuracy.yardsticks.journal import YardstickJournal
from benchmarks.accuracy.yardsticks.measure import measure
from benchmarks.accuracy.yardsticks.report import (
    Measured,
    as_csv,
    as_json,
    as_markdown,
    write_between_markers,
)
from benchmarks.accuracy.yardsticks.table import Row, build_rows
from tests.benchmarks.accuracy.yardsticks.sample import SampleYardstick
from vllm_autoprune.evaluation.run import Progress
from vllm_autoprune.statistics import Estimate

NAMES = ("divprune", "instruction-free")


def _rows(tmp_path: Path, *wrong: str) -> list[Row]:
    yardstick = SampleYardstick(wrong=wrong)
    cases = build_cases(yardstick.budgets, yardstick.available, NAMES)
    with YardstickJournal(tmp_path / "journal.jsonl", yardstick.model) as journal:
        progress = Progress(lambda line: None)
        return list(build_rows(measure(yardstick, cases, 8, journal, progress)))


def _find(rows: list[Row], name: str, category: str | None = None) -> Row:
    return next(row for row in rows if (row.name, row.category, row.kind) == (name, category, None))


def test_differences_are_paired_with_the_control_and_the_base(tmp_path: Path) -> None:
    rows = _rows(tmp_path, "resized", "divprune")
    state = _find(rows, "instruction-free")
    assert state.accuracy == Estimate(50, 50, 50) and state.tokens == 4
    assert state.less_resized == state.less_base == Estimate(50, 50, 50)
    assert _find(rows, "instruction-free", "first").less_resized == Estimate(100, 100, 100)
    assert _find(rows, "instruction-free", "second").less_resized == Estimate(0, 0, 0)
    assert _find(rows, "divprune").less_resized == Estimate(0, 0, 0)
    assert _find(rows, "divprune").less_base is None
    assert _find(rows, "divprune").less_default == Estimate(-50, -50, -50)
    assert state.less_default is None, "it is the default itself"
    assert _find(rows, "full").less_resized is None
    assert _find(rows, "resized").less_resized is None


@pytest.mark.parametrize(
    ("wrong", "verdict"),
    [
        (("resized",), "`instruction-free` is better than resizing"),
        (("instruction-free",), "resizing is better than `instruction-free`"),
        ((), "not decided"),
    ],
)
def test_the_page_says_who_wins(tmp_path: Path, wrong: tuple[str, ...], verdict: str) -> None:
    rows = _rows(tmp_path, *wrong)
    page = as_markdown([Measured("sample", "sample 1", "instruction-free", "K = 4", rows)])
    line = next(line for line in page.splitlines() if line.startswith("- K = 4, all questions"))
    assert line.endswith(verdict)
    assert "| **instruction-free** | not read | " in page


def test_json_has_every_kind_at_every_budget(tmp_path: Path) -> None:
    rows = _rows(tmp_path)
    (document,) = json.loads(as_json([Measured("sample", "sample 1", "", "K = 4", rows)]))
    kinds = {(row["budget"], row["kind"]) for row in document["rows"]}
    assert kinds == {(budget, kind) for budget in ("all", "K = 4") for kind in (None, "a", "b")}


def test_the_rows_are_a_table_of_data(tmp_path: Path) -> None:
    rows = _rows(tmp_path, "resized")
    text = as_csv([Measured("sample", "sample 1", "", "K = 4", rows)])
    records = list(csv.DictReader(text.splitlines()))
    assert len(records) == len(rows)
    (state,) = (
        one for one in records if (one["name"], one["category"], one["kind"]) == (NAMES[1], "", "")
    )
    assert (state["accuracy"], state["less_resized_low"]) == ("50.0", "50.0")
    assert records[0]["name"] == "full" and records[0]["less_resized"] == ""


def test_only_what_stands_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- yardsticks -->\nold\n<!-- /yardsticks -->\nafter\n")
    write_between_markers(page, "new\n")
    assert page.read_text() == (
        "before\n<!-- yardsticks -->\n\nnew\n\n<!-- /yardsticks -->\nafter\n"
    )
    page.write_text("no markers")
    with pytest.raises(ValueError, match="has no <!-- yardsticks -->"):
        write_between_markers(page, "new\n")
