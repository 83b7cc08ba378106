from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cost.efficiency.models import Model
from benchmarks.cost.efficiency.table import compute_cost, flops_ratio
from vllm_autoprune.backbones import LLAVA_NEXT_7B

MODEL = Model(
    name=LLAVA_NEXT_7B.name,
    folder=Path(),
    geometry=LLAVA_NEXT_7B,
    depth=LLAVA_NEXT_7B.layers,
    side=672,
    flags=(),
    scored=False,
)


@pytest.mark.parametrize(
    ("arm", "times_fewer"),
    [("cdpruner", 9.9), ("AutoPrune", 9.9), ("fastv", 7.6), ("pyramiddrop", 2.9),
     ("sparsevlm", 6.1), ("dart", 6.1)],
)  # fmt: skip
def test_layers_that_rank_all_tokens_are_counted(arm: str, times_fewer: float) -> None:
    cost = compute_cost(MODEL, arm, 320, [])
    assert round(flops_ratio(MODEL, cost), 1) == times_fewer
    assert cost.tokens == 320
