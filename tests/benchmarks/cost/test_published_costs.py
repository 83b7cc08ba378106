"""The formulas of ``vllm_autoprune.cost`` against every published and recomputed cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from vllm_autoprune.backbones import BACKBONE_SHAPES, BackboneShape, find_backbone
from vllm_autoprune.cost import TERA, estimate_cost

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


@pytest.mark.parametrize("row", DATA["not_recoverable"], ids=lambda r: r["method"])
def test_of_staged_methods_only_the_average_follows(row: dict[str, Any]) -> None:
    """KV is linear in tokens, so it determines their average, but neither stages nor FLOPs."""
    average = float(row["tokens_a_layer"])
    per_token = estimate_cost(LLAVA_NEXT_7B, 1).kv_mib
    assert rounds_to(average * per_token, row["kv_mib"])
    assert rounds_to(41.7 / float(row["teraflops"]), row["times_fewer"])
    # Spread evenly, that average would cost less than is printed: the first layers saw more.
    assert estimate_cost(LLAVA_NEXT_7B, round(average)).teraflops < float(row["teraflops"]) - 0.05


def _variant(count: Callable[[BackboneShape, int], float]) -> Callable[[int], float]:
    return lambda n: LLAVA_NEXT_7B.layers * count(LLAVA_NEXT_7B, n) / TERA


VARIANTS: dict[str, Callable[[int], float]] = {
    "multiply-accumulates": lambda n: estimate_cost(LLAVA_NEXT_7B, n).teraflops / 2,
    "two feed-forward matrices, multiply-accumulates": _variant(
        lambda g, n: 4 * n * g.width**2 + 2 * n**2 * g.width + 2 * n * g.width * g.feed_forward
    ),
    "two feed-forward matrices": _variant(
        lambda g, n: (
            2 * (4 * n * g.width**2 + 2 * n**2 * g.width + 2 * n * g.width * g.feed_forward)
        )
    ),
    "causal half of attention": _variant(
        lambda g, n: 2 * (4 * n * g.width**2 + n**2 * g.width + 3 * n * g.width * g.feed_forward)
    ),
    "60 text tokens as well": lambda n: estimate_cost(LLAVA_NEXT_7B, n, text=60).teraflops,
}


@pytest.mark.parametrize("row", DATA["variants_that_do_not_fit"], ids=lambda r: r["variant"])
def test_no_other_way_to_count_gives_the_printed_figures(row: dict[str, Any]) -> None:
    count = VARIANTS[row["variant"]]
    for tokens in (2880, 320):
        assert rounds_to(count(tokens), row[str(tokens)])
    assert not (rounds_to(count(2880), "41.7") and rounds_to(count(320), "4.2"))


def test_kv_of_the_13b_geometry_is_the_one_of_another_table() -> None:
    for tokens, written in DATA["thirteen_b_kv_mib"].items():
        assert rounds_to(estimate_cost(LLAVA_13B, int(tokens)).kv_mib, written)


def test_every_printed_reduction_follows() -> None:
    for tokens, budget, percent in (
        (576, 32, "94.4"), (576, 64, "88.9"), (576, 128, "77.8"),
        (2880, 160, "94.4"), (2880, 320, "88.9"), (2880, 640, "77.8"),
        (1296, 256, "80.2"), (1296, 128, "90.1"), (1296, 64, "95.1"), (1296, 32, "97.5"),
    ):  # fmt: skip
        assert rounds_to(100 * (1 - budget / tokens), percent)
    assert (LLAVA_7B.tokens, LLAVA_NEXT_7B.tokens) == (576, 2880)
