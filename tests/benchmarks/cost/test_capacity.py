"""Predicted blocks of a request, and the verdict on measured counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common import BenchmarkError
from benchmarks.common.shapes import write_llava_next
from benchmarks.cost.capacity import (
    OUTPUT_TOKENS,
    EngineCounts,
    compare,
    markdown,
    predicted_blocks,
)
from benchmarks.server import run_engine

STOCK = EngineCounts(
    prompt_tokens=2933, blocks_each=92, at_once=10, blocks_at_most=920, preempted=0, answered=120
)


def pruned(**changes: int) -> EngineCounts:
    counts = EngineCounts(
        prompt_tokens=325, blocks_each=11, at_once=84, blocks_at_most=924, preempted=0, answered=120
    )
    return counts.model_copy(update=changes)


@pytest.mark.parametrize(
    ("prompt", "output", "blocks"), [(32, 1, 1), (32, 2, 2), (325, 12, 11), (2933, 12, 92)]
)
def test_the_last_token_needs_no_block(prompt: int, output: int, blocks: int) -> None:
    assert predicted_blocks(prompt, output) == blocks


def test_the_promise_needs_predicted_blocks_and_enough_requests() -> None:
    assert OUTPUT_TOKENS == 12
    comparison = compare(STOCK, pruned())
    assert comparison.verdict == "holds"
    assert comparison.ratio == 8.4 and comparison.predicted == 11
    assert compare(STOCK, pruned(blocks_each=12)).verdict == "does not hold"
    assert compare(STOCK, pruned(at_once=79)).verdict == "does not hold"
    assert "11 blocks a request predicted, 12 measured: does not hold" in markdown(
        compare(STOCK, pruned(blocks_each=12)), 931
    )


def test_requests_that_all_ran_at_once_are_said_to_be_too_few() -> None:
    stock = STOCK.model_copy(update={"at_once": 8, "answered": 8})
    few = compare(stock, pruned(at_once=8, answered=8))
    assert few.verdict == "inconclusive"
    assert "inconclusive (too few requests: all 8 ran at once" in markdown(few, 931)


def test_a_tiled_shape_may_be_narrow(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        write_llava_next(tmp_path / "next", 1, tower_layers=2, width=128)
    )
    assert (config.text_config.hidden_size, config.text_config.num_attention_heads) == (128, 1)
    assert config.vision_config.num_hidden_layers == 2
    assert [672, 672] in [list(pair) for pair in config.image_grid_pinpoints]


def test_a_failed_engine_is_reported_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"the engine ended with 1; see .*log"):
        run_engine("benchmarks.absent", log=tmp_path / "log")
    assert "No module named" in (tmp_path / "log").read_text()
