"""`cost`: FLOPs and bytes by hand, and backbones by name, id and configuration.

Published efficiency tables are recomputed by ``tests/benchmarks/cost``.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.cli.commands import Captured, run, run_json
from tests.tables import parametrize_from_file
from vllm_autoprune.backbones import (
    BACKBONE_SHAPES,
    find_backbone,
    find_config_class,
)
from vllm_autoprune.cli.main import main
from vllm_autoprune.tower import VisionTower


def test_layers_by_hand() -> None:
    # Gemma 3's 8 heads of 256 in a model 2560 wide: queries are narrower than the model.
    layer = replace(BACKBONE_SHAPES["gemma-3-4b"], layers=1)
    projections = 2 * 2560 * (2 * 2048 + 2 * 1024)
    attention = 2 * 2 * 2048
    feed_forward = 2 * 3 * 2560 * 10240
    assert layer.estimate_cost(1).flops == projections + attention + feed_forward
    # Three layers of four keep a state and no keys; keys 2048 wide, values 4096, one token.
    qwen = BACKBONE_SHAPES["qwen3.5-9b"]
    four = replace(qwen, layers=4)
    feed_forward = 2 * 3 * 4096 * 12288
    linear = 2 * (4096 * (2 * 2048 + 3 * 4096) + 3 * 4096 * 128)
    full = 2 * (4096 * (2 * 4096 + 2 * 1024) + 2 * 4096)
    assert four.estimate_cost(1).flops == 3 * linear + full + 4 * feed_forward
    assert qwen.estimate_cost(100).kv_bytes == 8 * 100 * 2 * 1024 * 2


def test_cost_counts_text_and_refuses_what_is_no_number(capsys: Captured) -> None:
    record = run_json(capsys, "cost --backbone llava-1.5-7b --text 60")
    rows = [(row["tokens"], row["kv_mib"]) for row in record["rows"]]
    assert rows == [(576, 318), (64, 62)] and record["assumptions"]
    for tokens in ("100% 1/9 64", "1/9", "64 576"):
        record = run_json(capsys, f"cost --backbone llava-1.5-7b --tokens {tokens}")
        assert [row["tokens"] for row in record["rows"]] == [576, 64]
    assert main(["cost", "--backbone", "llava-1.5-7b", "--text", "-1"]) == 1
    assert "--text: -1 is not a number of tokens" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["cost", "--backbone", "llava-1.5-7b", "--text", "٣"])
    assert "argument --text: '٣' is not a number of tokens" in capsys.readouterr().err


def test_every_served_family_has_a_backbone_that_its_hub_id_names() -> None:
    from vllm_autoprune.serving.models import BACKBONES

    families = {backbone.name for backbone in BACKBONES.values()}
    assert families == {shape.family for shape in BACKBONE_SHAPES.values()}
    for shape in BACKBONE_SHAPES.values():
        assert find_backbone(re.split("[:;]", shape.source)[0]) == shape
    assert [
        BACKBONE_SHAPES[name].sign for name in ("llava-1.5-7b", "qwen2.5-vl-7b")
    ] == ["-", "+"]


@parametrize_from_file("name", "fields")
def test_a_config_with_the_numbers_of_a_backbone_costs_as_much(
    name: str, fields: dict[str, object], tmp_path: Path
) -> None:
    shape = BACKBONE_SHAPES[name]
    text = {
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "head_dim": 128,
        "intermediate_size": shape.feed_forward,
        "num_key_value_heads": shape.kv_width // 128,
        "num_attention_heads": (shape.query_width or shape.width) // 128,
        **fields,
    }
    config = {"model_type": shape.family, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = find_backbone(str(tmp_path))
    assert read.estimate_cost(64, text=9) == shape.estimate_cost(64, text=9)


@parametrize_from_file("backbone", "text")
def test_a_backbone_that_cannot_be_read_is_refused_in_one_line(
    backbone: str, text: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["cost", "--backbone", backbone]) == 1
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


@parametrize_from_file("family", "vision", "cells", "teraflops")
def test_flops_of_a_tower_are_those_of_its_published_sizes(
    family: str,
    vision: dict[str, int],
    cells: tuple[int, ...],
    teraflops: tuple[float, ...],
) -> None:
    """Full attention everywhere, and in 4 of 32 layers with windows of 64 patches elsewhere."""
    config = AutoConfig.for_model(family, vision_config=vision)
    tower = VisionTower.of_config(config)
    counted = [tower.count_flops(number) / 1e12 for number in cells]
    assert counted == pytest.approx(teraflops, rel=2e-3)


@parametrize_from_file("name", "family", "fields")
def test_the_tower_of_a_backbone_is_that_of_its_published_configuration(
    name: str, family: str, fields: dict[str, Any]
) -> None:
    listed = BACKBONE_SHAPES[name].tower
    config_class: Any = find_config_class(family)
    assert VisionTower.of_config(config_class(**fields), listed) == listed


def test_fewer_flops_are_those_of_tower_and_prefill(capsys: Captured) -> None:
    """The tower of a 7B Qwen encodes all 5,184 patches, whatever is pruned."""
    call = "cost --backbone qwen2.5-vl-7b --tokens 1296 256"
    record = run_json(capsys, call)
    unpruned, pruned = (row["total_teraflops"] for row in record["rows"])
    assert record["tower_teraflops"] == pytest.approx(7.26, abs=0.01)
    assert unpruned / pruned == pytest.approx(2.34, abs=0.01)
    assert "2.34x" in run(capsys, call)
    unknown = run(capsys, "cost --backbone gemma-4-31b")
    assert "sizes of this one are not known" in unknown
