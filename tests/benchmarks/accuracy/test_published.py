"""All 86 published rows: Acc. reproduces in each, and Rel. follows one of two definitions."""

from __future__ import annotations

import json

import pytest

from benchmarks.accuracy.__main__ import main, read_published
from vllm_autoprune.evaluation.scoring import MMBENCH

TABLES = read_published()
ROWS = [(table, row) for table in TABLES for row in table.rows]


def test_the_tables_are_complete() -> None:
    assert {(t.table, t.backbone): len(t.rows) for t in TABLES} == {
        ("main", "llava-1.5-7b"): 8,
        ("main", "llava-next-7b"): 8,
        ("transfer to Qwen", "qwen2.5-vl-7b"): 9,
        ("supplement, LLaVA-1.5", "llava-1.5-7b"): 28,
        ("supplement, LLaVA-NeXT", "llava-next-7b"): 28,
        ("transfer across budgets", "llava-1.5-7b"): 5,
    }
    assert len(ROWS) == 86


def test_acc_reproduces_and_rel_follows_the_definition_that_the_data_file_names() -> None:
    assert [(table.table, row) for table, row in ROWS if not table.acc_reproduces(row)] == []
    assert all(table.definition(row) == row.rel_follows for table, row in ROWS)


def test_only_autoprune_on_llava_follows_the_papers_formula_alone() -> None:
    """Baselines carry the mean of ratios, AutoPrune the ratio of means, in one and the same table:
    a difference of Rel. between the two is of two different things.
    """
    assert {
        (table.table, table.backbone, row.method, row.tokens)
        for table, row in ROWS
        if table.definition(row) == "ratio of means"
    } == {
        (table, "llava-1.5-7b", "AutoPrune", tokens)
        for table, budgets in (
            ("main", (32,)),
            ("supplement, LLaVA-1.5", (128, 32)),
            ("transfer across budgets", (16, 32, 128)),
        )
        for tokens in budgets
    }


def test_one_definition_explains_both_backbones_at_32_tokens() -> None:
    """Printed: 99.7 against 94.3."""
    main_table, both = TABLES[0], {}
    for row in main_table.rows:
        figures = main_table.recompute(row)
        assert figures.ratio_of_means is not None and figures.mean_of_ratios is not None
        both[row.method] = (round(figures.ratio_of_means, 2), round(figures.mean_of_ratios, 2))
    assert both["AutoPrune"] == (99.71, 99.53)
    assert both["CDPruner"] == (94.70, 94.30)


@pytest.mark.parametrize(
    ("label", "full", "expected"),
    [
        ("LLaVA-1.5", 63.84, {128: (63.32, 63.24), 64: (62.44, 62.54), 32: (61.34, 61.90)}),
        ("LLaVA-NeXT", 66.15, {640: (65.92, 65.29), 320: (64.84, 64.51), 160: (63.73, 63.82)}),
    ],
)
def test_without_mmbench_autoprune_is_below_cdpruner_in_three_of_six_settings(
    label: str, full: float, expected: dict[int, tuple[float, float]]
) -> None:
    (table,) = [table for table in TABLES if table.table == f"supplement, {label}"]
    acc = {(row.method, row.tokens): table.recompute(row, MMBENCH).acc for row in table.rows}
    assert round(acc[table.full.method, table.full.tokens], 2) == full
    for tokens, pair in expected.items():
        measured = [round(acc[method, tokens] + 1e-9, 2) for method in ("CDPruner", "AutoPrune")]
        assert tuple(measured) == pair


def test_the_command_prints_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert len(records) == 86 and records[7]["rel_follows"] == "ratio of means"
    assert main([]) == 0
    text = capsys.readouterr().out
    assert text.count("| AutoPrune | 32 | 63.2 | 63.1") == 3
    assert "Acc. reproduces in 86 of 86 rows" in text and "mean of ratios: 58" in text
