"""The formulas of ``vllm_autoprune.cost`` against every published and recomputed cost."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from vllm_autoprune.backbones import BACKBONE_SHAPES, find_backbone
from vllm_autoprune.cost import estimate_cost

LLAVA_7B = BACKBONE_SHAPES["llava-1.5-7b"]
LLAVA_13B = BACKBONE_SHAPES["llava-1.5-13b"]
LLAVA_NEXT_7B = BACKBONE_SHAPES["llava-next-7b"]

PATH = Path(__file__).with_name("published_costs.json")
DATA: dict[str, Any] = json.loads(PATH.read_text())


def rounds_to(value: float, written: str) -> bool:
    """Whether a figure equals a printed one to its last digit."""
    unit = Decimal(1).scaleb(int(Decimal(written).as_tuple().exponent))
    return abs(Decimal(value) - Decimal(written)) <= unit / 2


@pytest.mark.parametrize("row", DATA["costs"], ids=lambda r: f"{r['backbone']}-{r['tokens']}")
def test_every_count_of_tokens_costs_what_the_table_says(row: dict[str, Any]) -> None:
    cost = estimate_cost(find_backbone(row["backbone"]), row["tokens"])
    assert rounds_to(cost.teraflops, row["teraflops"])
    assert rounds_to(cost.kv_mib, row["kv_mib"])


@pytest.mark.parametrize("row", DATA["printed"], ids=lambda r: r["method"])
def test_every_printed_row_follows_on_llava_next(row: dict[str, Any]) -> None:
    cost = estimate_cost(LLAVA_NEXT_7B, row["tokens"], full_layers=row.get("full_layers", 0))
    assert rounds_to(cost.teraflops, row["teraflops"])
    assert rounds_to(cost.kv_mib, row["kv_mib"])
    if row["times_fewer"] is not None:
        # The published ratios are quotients of rounded figures.
        printed = float(DATA["printed"][0]["teraflops"]) / float(row["teraflops"])
        assert rounds_to(printed, row["times_fewer"])


def test_the_exact_ratio_is_9_921() -> None:
    full, pruned = estimate_cost(LLAVA_NEXT_7B, 2880), estimate_cost(LLAVA_NEXT_7B, 320)
    assert rounds_to(full.flops / pruned.flops, "9.921")


def test_fastv_leaves_150_tokens_after_two_full_layers() -> None:
    cost = estimate_cost(LLAVA_NEXT_7B, 320, full_layers=2)
    assert cost.after == 150
    assert rounds_to(cost.teraflops, "4.4356") and cost.kv_mib == 160.3125


def test_kv_of_the_13b_geometry_is_the_one_of_another_table() -> None:
    for tokens, written in DATA["thirteen_b_kv_mib"].items():
        assert rounds_to(estimate_cost(LLAVA_13B, int(tokens)).kv_mib, written)
