"""All 86 published rows: Acc. reproduces in each, and Rel. follows one of two definitions."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from benchmarks.accuracy.__main__ import main
from vllm_autoprune.evaluation.published import Audit, audit, read_published

SOURCE = read_published()
ROWS = list(audit(SOURCE))


def name(row: Audit) -> str:
    return f"{row.table.table} / {row.table.backbone} / {row.row.method} {row.row.tokens}"


def test_the_tables_are_complete() -> None:
    assert {(t.table, t.backbone): len(t.rows) for t in SOURCE.tables} == {
        ("main", "llava-1.5-7b"): 8,
        ("main", "llava-next-7b"): 8,
        ("transfer to Qwen", "qwen2.5-vl-7b"): 9,
        ("supplement, LLaVA-1.5", "llava-1.5-7b"): 28,
        ("supplement, LLaVA-NeXT", "llava-next-7b"): 28,
        ("transfer across budgets", "llava-1.5-7b"): 5,
    }
    assert len(ROWS) == 86


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_acc_reproduces_to_the_last_printed_digit(row: Audit) -> None:
    assert row.acc_reproduces, (row.acc, row.row.acc)


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_rel_follows_the_definition_that_the_data_file_names(row: Audit) -> None:
    assert row.follows == row.row.rel_follows != "neither"


def test_58_printed_values_contradict_the_papers_own_formula() -> None:
    """Rel. is written as a ratio of means; these follow the mean of ratios alone."""
    assert Counter(row.follows for row in ROWS) == {
        "mean of ratios": 58,
        "both": 22,
        "ratio of means": 6,
    }


def test_only_autoprune_on_llava_follows_the_papers_formula_alone() -> None:
    """Baselines carry the mean of ratios, AutoPrune the ratio of means, in one and the same table:
    a difference of Rel. between the two is of two different things.
    """
    alone = [name(row) for row in ROWS if row.follows == "ratio of means"]
    assert alone == [
        "main / llava-1.5-7b / AutoPrune 32",
        "supplement, LLaVA-1.5 / llava-1.5-7b / AutoPrune 128",
        "supplement, LLaVA-1.5 / llava-1.5-7b / AutoPrune 32",
        "transfer across budgets / llava-1.5-7b / AutoPrune 16",
        "transfer across budgets / llava-1.5-7b / AutoPrune 32",
        "transfer across budgets / llava-1.5-7b / AutoPrune 128",
    ]


def test_one_definition_explains_both_backbones_at_32_tokens() -> None:
    """Printed: 99.7 against 94.3."""
    both = {
        row.row.method: (round(row.ratio_of_means, 2), round(row.mean_of_ratios, 2))
        for row in ROWS
        if row.table is SOURCE.tables[0]
    }
    assert both["AutoPrune"] == (99.71, 99.53)
    assert both["CDPruner"] == (94.70, 94.30)


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (
            "supplement, LLaVA-1.5",
            {128: (63.32, 63.24), 64: (62.44, 62.54), 32: (61.34, 61.90), "full": 63.84},
        ),
        (
            "supplement, LLaVA-NeXT",
            {640: (65.92, 65.29), 320: (64.84, 64.51), 160: (63.73, 63.82), "full": 66.15},
        ),
    ],
)
def test_without_mmbench_autoprune_is_below_cdpruner_in_three_of_six_settings(
    label: str, expected: dict[object, object]
) -> None:
    rows = [row for row in ROWS if row.table.table == label]
    measured: dict[object, object] = {
        tokens: tuple(
            round(row.acc_without_mmbench + 1e-9, 2)
            for method in ("CDPruner", "AutoPrune")
            for row in rows
            if (row.row.method, row.row.tokens) == (method, tokens)
        )
        for tokens in expected
        if tokens != "full"
    }
    full = next(row for row in rows if row.row.method == "full")
    assert {**measured, "full": round(full.acc_without_mmbench, 2)} == expected


def test_the_command_prints_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert len(records) == 86 and records[7]["rel_follows"] == "ratio of means"
    assert main([]) == 0
    text = capsys.readouterr().out
    assert text.count("| AutoPrune | 32 | 63.2 | 63.1") == 3
    assert "Acc. reproduces in 86 of 86 rows" in text and "mean of ratios: 58" in text
