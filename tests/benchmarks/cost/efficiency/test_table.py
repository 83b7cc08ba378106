"""Tests of the efficiency table, from hand-written passes, and of token counts of image sizes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks.common.shapes import write_llava_next, write_qwen
from benchmarks.cost.__main__ import build_parser
from benchmarks.cost.efficiency.measure import Pass, Refusal
from benchmarks.cost.efficiency.models import MINI, load_model
from benchmarks.cost.efficiency.table import markdown
from vllm_autoprune import load_state
from vllm_autoprune.cost import estimate_cost


def lines_of(parts: Iterable[str]) -> list[str]:
    return "\n".join(parts).split("\n")


def one(prefill: float, kept: float | None, score: tuple[float, float] | None = None) -> Pass:
    return Pass(
        ttft=(prefill + 0.01, prefill + 0.02, prefill + 0.03),
        again=(0.01, 0.02, 0.04),
        prefill=prefill,
        decode=(0.004, 0.005, 0.006),
        prompt_tokens=160,
        visual_tokens=kept,
        resident=1 << 30,
        score=score,
    )


def test_computed_and_measured_columns_stand_side_by_side(tmp_path: Path) -> None:
    mini = load_model(MINI, 0, tmp_path)
    lines = lines_of(
        markdown(
            mini,
            16,
            {
                "full": [one(0.040, None, (99.0, 98.0)), one(0.060, None, (99.0, 98.0))],
                "AutoPrune": [one(0.020, 16.0, (100.0, 97.0))],
                "broken": [Refusal(reason="no [CLS] token")],
            },
        )
    )
    full, pruned, broken = lines[4:7]
    flops = estimate_cost(mini.geometry, 144).flops / estimate_cost(mini.geometry, 16).flops
    assert full.startswith("| full | 144 | ") and "(1.0x fewer) | 50.0 (1.00x faster)" in full
    assert "| 60.0 (" not in full and full.endswith("| 5.00 | 0.6328 | 1024 | 197.0 |")
    times = "20.0 (2.50x faster) | 40.0 (35.0–45.0) | 20.0 (0.50x) | 5.00 |"
    assert f"({flops:.1f}x fewer) | {times}" in pruned
    assert "| 0.07031 |" in pruned  # 16 tokens x 2 x 6 layers x 192 x 2 bytes
    assert broken.startswith("| broken | not served: no [CLS] token |")
    assert broken.count("|") == full.count("|")


def test_cost_is_computed_at_full_depth(tmp_path: Path) -> None:
    shape = load_model("llava-1.5-7b", 2, tmp_path)
    lines = lines_of(markdown(shape, 64, {"full": [one(1.0, None)], "AutoPrune": [one(0.5, 64.0)]}))
    assert lines[0].startswith("llava-1.5-7b, 2 of 32 language layers served, K = 64")
    assert "| 7.634 (1.0x fewer)" in lines[4] and "| 288 |" in lines[4]
    assert "| 0.8311 (9.2x fewer)" in lines[5] and "| 32 |" in lines[5]
    assert lines[4].endswith("none: dummy weights |")
    assert any("computed for all 32 layers" in line for line in lines)


def _processed(folder: Path, side: int) -> list[int]:
    from PIL import Image
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": "w5 w6"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    inputs = processor(text=text, images=Image.new("RGB", (side, side)), return_tensors="pt")
    ids: list[int] = inputs["input_ids"][0].tolist()
    return ids


def test_llava_next_has_five_tiles_and_a_newline_a_row(tmp_path: Path) -> None:
    ids = _processed(write_llava_next(tmp_path, 1), 672)
    assert ids.count(32000) == 5 * 576 + 48


def test_qwen_has_1296_tokens_at_1008_pixels(tmp_path: Path) -> None:
    ids = _processed(write_qwen(tmp_path, 3), 1008)
    assert ids.count(151655) == 1296
    config = json.loads((tmp_path / "config.json").read_text())
    text = config["text_config"]
    assert (text["num_hidden_layers"], text["hidden_size"]) == (3, 3584)
    assert (text["num_key_value_heads"], config["vision_config"]["depth"]) == (4, 32)


def test_every_base_policy_is_a_state_that_ships() -> None:
    names = build_parser("efficiency").parse_args(["efficiency"]).policies.split(",")
    assert len(names) == 9
    assert {load_state(name).base_policy.name for name in names} == set(names)


@pytest.mark.parametrize("wrong", [["--model", "llava"], ["--budget", "many"]])
def test_invalid_arguments_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        build_parser("efficiency").parse_args(["efficiency", *wrong])
