"""Costs, and what `cost` prints, against recomputed figures of published efficiency tables."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from vllm_autoprune.backbones import BACKBONE_SHAPES, BackboneShape, find_backbone
from vllm_autoprune.cli.main import main
from vllm_autoprune.cost import estimate_cost, prefill_flops
from vllm_autoprune.errors import ConfigError

LLAVA_7B = BACKBONE_SHAPES["llava-1.5-7b"]
LLAVA_NEXT_7B = BACKBONE_SHAPES["llava-next-7b"]
QWEN3_5_9B = BACKBONE_SHAPES["qwen3.5-9b"]


@pytest.mark.parametrize(
    ("backbone", "tokens", "text", "teraflops", "mib"),
    [
        ("llava-1.5-7b", 576, 0, 7.634, 288),
        ("llava-1.5-7b", 128, 0, 1.666, 64),
        ("llava-1.5-7b", 64, 0, 0.831, 32),
        ("llava-1.5-7b", 32, 0, 0.415, 16),
        ("llava-next-7b", 2880, 0, 41.6504, 1440),
        ("llava-next-7b", 640, 0, 8.504, 320),
        ("llava-next-7b", 320, 0, 4.1983, 160),
        ("llava-next-7b", 160, 0, 2.086, 80),
        ("llava-next-7b", 2880, 60, 42.61065, 1470),
        ("llava-next-7b", 320, 60, 4.99747, 190),
        ("qwen2.5-vl-7b", 1296, 0, 17.588, 70.875),
        ("qwen2.5-vl-7b", 256, 0, 3.367, 14),
        ("qwen2.5-vl-7b", 128, 0, 1.677, 7),
        ("qwen2.5-vl-7b", 64, 0, 0.837, 3.5),
        ("qwen2.5-vl-7b", 32, 0, 0.418, 1.75),
        ("llava-1.5-13b", 2880, 0, None, 2250),
        ("llava-1.5-13b", 320, 0, None, 250),
    ],
)
def test_every_row_of_the_table(
    backbone: str, tokens: int, text: int, teraflops: float | None, mib: float
) -> None:
    actual = estimate_cost(BACKBONE_SHAPES[backbone], tokens, text=text)
    assert teraflops is None or actual.teraflops == pytest.approx(teraflops, abs=6e-4)
    assert actual.kv_mib == mib


def test_layers_by_hand() -> None:
    """Two tokens, d = 4, m = 3, k = 2: projections 96, attention 32, feed-forward 72 MACs."""
    tiny = BackboneShape("tiny", "t", 1, 4, 3, 2, 1, 2, 1, "clip", True, True, False, "")
    assert prefill_flops(tiny, (2,)) == 2 * (2 * 4 * (8 + 4) + 2 * 4 * 4 + 3 * 2 * 4 * 3)
    assert estimate_cost(tiny, 2).kv_bytes == 2 * 2 * 2 * 2
    # Gemma 3's 8 heads of 256 in a model 2560 wide: queries are narrower than the model.
    layer = replace(BACKBONE_SHAPES["gemma-3-4b"], layers=1)
    projections = 2 * 2560 * (2 * 2048 + 2 * 1024)
    attention, feed_forward = 2 * 2 * 2048, 2 * 3 * 2560 * 10240
    assert prefill_flops(layer, (1,)) == projections + attention + feed_forward
    # Three layers of four keep a state and no keys; keys 2048 wide, values 4096, one token.
    four = replace(QWEN3_5_9B, layers=4)
    feed_forward = 2 * 3 * 4096 * 12288
    linear = 2 * (4096 * (2 * 2048 + 3 * 4096) + 3 * 4096 * 128)
    full = 2 * (4096 * (2 * 4096 + 2 * 1024) + 2 * 4096)
    assert prefill_flops(four, (1,) * 4) == 3 * linear + full + 4 * feed_forward
    assert estimate_cost(four, 1).kv_bytes == 2 * 1024 * 2
    assert estimate_cost(QWEN3_5_9B, 100).kv_bytes == 8 * 100 * 2 * 1024 * 2


def test_averages_over_layers_are_never_below_what_was_asked_for() -> None:
    for tokens in range(200, 2880, 97):
        rest = estimate_cost(LLAVA_NEXT_7B, tokens, full_layers=2).after
        assert 2 * 2880 + 30 * rest >= 32 * tokens > 2 * 2880 + 30 * (rest - 1)
    assert estimate_cost(LLAVA_7B, 576, full_layers=2) == estimate_cost(LLAVA_7B, 576)


@pytest.mark.parametrize(
    ("backbone", "tokens", "layers"),
    [(LLAVA_7B, 32, 2), (LLAVA_NEXT_7B, 160, 2), (LLAVA_NEXT_7B, 320, 8)],
)
def test_a_budget_that_full_layers_alone_exceed_is_refused(
    backbone: BackboneShape, tokens: int, layers: int
) -> None:
    with pytest.raises(ConfigError, match=rf"--full-layers.*{layers * backbone.tokens}"):
        estimate_cost(backbone, tokens, full_layers=layers)


def test_every_wrong_setting_is_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        estimate_cost(LLAVA_7B, 0, text=-1, full_layers=32)
    places = [problem.where for problem in caught.value.problems]
    assert places == ["--tokens", "--text", "--full-layers"]


def test_every_served_family_has_a_backbone_that_is_known_by_name() -> None:
    from vllm_autoprune.serving.models import BACKBONES

    assert {name: shape.tokens for name, shape in BACKBONE_SHAPES.items()} == {
        "llava-1.5-7b": 576, "llava-1.5-13b": 576, "llava-next-7b": 2880,
        "llava-onevision-7b": 3645, "qwen2-vl-7b": 1296, "qwen2.5-vl-7b": 1296,
        "qwen3-vl-8b": 1024, "qwen3-vl-30b-a3b": 1024, "qwen3.5-9b": 1024, "qwen3.5-35b-a3b": 1024,
        "glm-4.1v-9b": 1296, "glm-4.5v": 1296, "internvl3-8b": 1280, "idefics3-8b": 2873,
        "smolvlm2-2.2b": 1377, "smolvlm2-500m": 1088, "gemma-3-4b": 256,
    }  # fmt: skip
    families = {backbone.name for backbone in BACKBONES.values()}
    assert families == {shape.family for shape in BACKBONE_SHAPES.values()}
    assert (LLAVA_7B.sign, find_backbone("qwen2.5-vl-7b").sign) == ("-", "+")
    with pytest.raises(ConfigError, match=r"llava-1\.5-7b"):
        find_backbone("llava")


def test_the_efficiency_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["cost", "--backbone", "llava-next-7b", "--tokens", "2880", "320"]
    assert main(call) == 0
    output = capsys.readouterr().out
    rows = [line.split() for line in output.splitlines() if line.endswith("x")]
    assert rows[0] == ["2880", "41.65", "1440", "1.00x", "1.00x"]
    assert rows[1] == ["320", "4.198", "160", "9.92x", "9.00x"]
    assert "a multiply-accumulate is 2 FLOPs" in " ".join(output.split())
    assert output.splitlines()[0].endswith("text not counted")
    # FastV as published: two full layers and 320 on average are 149.33 tokens in the others.
    assert main([*call, "--full-layers", "2"]) == 0
    assert "  4.436  160.3125  " in capsys.readouterr().out
    assert main([*call, "--full-layers", "2", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][1]
    assert (row["last_layer"], row["mean_over_layers"]) == (150, 320.625)
    assert main(["cost", "--backbone", "llava-1.5-7b", "--text", "60", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["tokens"] for row in record["rows"]] == [576, 64]
    assert [row["kv_mib"] for row in record["rows"]] == [318, 62]
    assert record["assumptions"]
