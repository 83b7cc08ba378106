"""What cells inside the tower lose: the way of measuring it, and the rows that are recorded."""

from __future__ import annotations

import csv
import io
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_vl import modeling_qwen3_vl

from benchmarks.accuracy.tower import Answers, count_cost, name_rival
from benchmarks.cost.turns import Table
from benchmarks.yardsticks.examples import draw_examples
from benchmarks.yardsticks.miniqwen import MiniQwen
from vllm_autoprune.tpdsl.tower import Tower

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("rule", "cost", "rival"),
    [
        ("2/3@2/5", Fraction(4, 5), "resized to 80%"),
        ("1/2@2/5", Fraction(7, 10), "resized to 70%"),
        ("1/2@3/5", Fraction(4, 5), "resized to 80%"),
        ("1/4@1/2", Fraction(5, 8), "resized to 62%"),
    ],
)
def test_a_rival_costs_the_tower_as_much(rule: str, cost: Fraction, rival: str) -> None:
    assert (count_cost(rule), name_rival(rule)) == (cost, rival)


@torch.no_grad()
def test_cells_leave_the_yardstick_as_by_masked_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And where none leave, the rows are those of the whole tower."""
    qwen = MiniQwen()
    qwen.network.float()
    picture = draw_examples("test", 1, "miniqwen")[0].image
    every = qwen.encode_image(picture)
    same = qwen.encode_image(picture, tower=Tower.parse("100%@2/5", ""))
    assert torch.equal(same.rows, every.rows) and torch.equal(same.places, every.places)
    cut = qwen.encode_image(picture, tower=Tower.parse("1/2@2/5", ""))
    assert len(cut.places) == cut.grid.tokens == every.grid.tokens // 2
    hidden = torch.ones(every.grid.tokens, dtype=torch.bool)
    hidden[cut.places] = False
    mask = torch.zeros(4 * len(hidden)).masked_fill(
        hidden.repeat_interleave(4), -torch.inf
    )
    attend = modeling_qwen3_vl.eager_attention_forward
    later = [block.attn for block in qwen.network.model.visual.blocks[2:]]

    def attend_to_cells(module: Any, *inputs: Tensor, **named: Any) -> Any:
        if any(module is attention for attention in later):
            named["attention_mask"] = mask
        return attend(module, *inputs, **named)

    monkeypatch.setattr(modeling_qwen3_vl, "eager_attention_forward", attend_to_cells)
    masked = qwen.encode_image(picture)
    torch.testing.assert_close(cut.rows, masked.rows[cut.places], rtol=1e-3, atol=1e-3)
    assert not torch.allclose(cut.rows, every.rows[cut.places], rtol=1e-2, atol=1e-2)
    for level, expected in zip(cut.levels, masked.levels, strict=True):
        torch.testing.assert_close(level, expected[cut.places], rtol=1e-3, atol=1e-3)


def test_differences_are_paired_by_question() -> None:
    answers = Answers()
    answers.kinds = ["digit", "colour", "digit", "digit"]
    answers.pictures = [0, 0, 1, 1]
    answers.rights = {
        ("whole tower", 8): [True, True, False, True],
        ("1/2@2/5", 8): [True, False, False, True],
        ("resized to 70%", 8): [False, False, False, True],
    }
    file = io.StringIO()
    answers.write(Table(file), "norm")
    rows = list(csv.DictReader(io.StringIO(file.getvalue())))
    figures = {
        (row["what"], row["setting"].split("; ")[1]): float(row["value"])
        for row in rows
        if row["setting"].endswith("; all")
    }
    assert figures == {
        ("right", "whole tower"): 75,
        ("right", "1/2@2/5"): 50,
        ("right", "resized to 70%"): 25,
        ("right less whole tower", "1/2@2/5"): -25,
        ("right less resized to 70%", "1/2@2/5"): 25,
    }


def test_the_page_has_the_figures_of_the_recorded_rows() -> None:
    """Half of an interval's width stands for the interval."""
    with (ROOT / "docs/data/tower-accuracy.csv").open(encoding="utf-8") as file:
        rows = {(row["what"], row["setting"]): row for row in csv.DictReader(file)}
    page = (ROOT / "docs/accuracy.md").read_text(encoding="utf-8")
    table = re.search(r"\| left, after .*?\n\n", page, re.DOTALL)
    assert table is not None
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table[0].strip().splitlines()[2:]
    ]
    assert len(lines) >= 3
    for rule, cost, *cells in lines:
        assert float(count_cost(rule.strip("`"))) == pytest.approx(
            float(cost), abs=0.005
        )
        for part, cell in zip((4, 8, 16), cells, strict=True):
            setting = f"norm, K = N/{part}; {rule.strip('`')}; all"
            row = rows["right less whole tower", setting]
            half = (float(row["high"]) - float(row["low"])) / 2
            assert cell == f"{float(row['value']):+.1f} ± {half:.1f}"
