"""The published efficiency table, the one that is measured, and its extrapolation to full depth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import BenchmarkError
from benchmarks.cost.__main__ import main
from benchmarks.cost.depth import compose
from benchmarks.cost.efficiency import (
    Efficiency,
    Measurement,
    Model,
    compute_cost,
    format_table,
)
from vllm_autoprune.backbones import BACKBONE_SHAPES
from vllm_autoprune.cost import estimate_cost


@pytest.mark.parametrize(
    ("backbone", "tokens", "full_layers", "teraflops", "kv_mib"),
    [
        ("llava-1.5-7b", 576, 0, 7.634, 288),
        ("llava-1.5-7b", 128, 0, 1.666, 64),
        ("llava-1.5-7b", 64, 0, 0.831, 32),
        ("llava-1.5-7b", 32, 0, 0.415, 16),
        ("llava-next-7b", 2880, 0, 41.6504, 1440),
        ("llava-next-7b", 640, 0, 8.504, 320),
        ("llava-next-7b", 320, 0, 4.1983, 160),
        ("llava-next-7b", 160, 0, 2.086, 80),
        ("llava-next-7b", 320, 2, 4.4356, 160.3125),  # FastV
        ("qwen2.5-vl-7b", 1296, 0, 17.588, 70.875),
        ("qwen2.5-vl-7b", 256, 0, 3.367, 14),
        ("qwen2.5-vl-7b", 128, 0, 1.677, 7),
        ("qwen2.5-vl-7b", 64, 0, 0.837, 3.5),
        ("qwen2.5-vl-7b", 32, 0, 0.418, 1.75),
        ("llava-1.5-13b", 2880, 0, None, 2250),
        ("llava-1.5-13b", 320, 0, None, 250),
    ],
)
def test_every_row_of_the_published_efficiency_table_is_recomputed(
    backbone: str, tokens: int, full_layers: int, teraflops: float | None, kv_mib: float
) -> None:
    cost = estimate_cost(BACKBONE_SHAPES[backbone], tokens, full_layers=full_layers)
    assert teraflops is None or cost.teraflops == pytest.approx(teraflops, abs=6e-4)
    assert cost.kv_mib == kv_mib


MODEL = Model("llava-next-7b", Path(), BACKBONE_SHAPES["llava-next-7b"], ())


@pytest.mark.parametrize(
    ("arm", "times_fewer"),
    [("cdpruner", 9.9), ("AutoPrune", 9.9), ("fastv", 7.6), ("pyramiddrop", 2.9),
     ("sparsevlm", 6.1), ("dart", 6.1)],
)  # fmt: skip
def test_layers_that_rank_all_tokens_are_counted(arm: str, times_fewer: float) -> None:
    cost, full = (compute_cost(MODEL, name, 320, None) for name in (arm, "full"))
    assert round(full.flops / cost.flops, 1) == times_fewer
    assert (full.tokens, cost.tokens) == (2880, 320)


def measurement(ttft: tuple[float, ...], again: tuple[float, ...]) -> Measurement:
    return Measurement(
        ttft=ttft, again=again, prefill=ttft[0] / 2, decode=0.01, visual_tokens=319.6,
        device_memory=3 << 20,
    )  # fmt: skip


def test_the_table_has_a_row_for_every_arm() -> None:
    arms: Mapping[str, Measurement | str] = {
        "full": measurement((0.4, 0.4), (0.1, 0.1)).model_copy(update={"device_memory": None}),
        "fastv": "no attention",
        "AutoPrune": measurement((0.2, 0.2), (0.1, 0.1)),
    }
    text = format_table(MODEL, 320, arms)
    assert "32 language layers served, K = 320; 2 requests a row" in text
    cells = [line.strip("| ").split(" | ") for line in text.split("\n") if line[:2] == "| "]
    assert cells[2] == [
        "full", "2880", "41.65 (1.0x fewer)", "200.0 (1.00x faster)", "400.0 (400.0–400.0)",
        "100.0 (0.25x)", "10.00", "1440", "not measured",
    ]  # fmt: skip
    assert cells[3][:2] == ["fastv", "not served: no attention"]
    assert cells[4] == [
        "AutoPrune", "320", "4.198 (9.9x fewer)", "100.0 (2.00x faster)", "200.0 (200.0–200.0)",
        "100.0 (0.50x)", "10.00", "160", "3",
    ]  # fmt: skip


def table(layers: int, **changes: object) -> Efficiency:
    """TTFT at zero layers and per layer: stock 2 s + 1 s, later 0.1 s + 0.05 s; pruned 2.5 s or
    0.5 s + 0.1 s. An arm was not served.
    """

    def times(fixed: float, layer: float) -> tuple[float, ...]:
        return tuple(fixed + layer * layers + noise for noise in (-0.02, 0.0, 0.01))

    efficiency = Efficiency(
        model="llava-next-7b", layers=layers, budget=320, environment={},
        digests={"full": None, "AutoPrune": "ab"},
        arms={
            "full": measurement(times(2.0, 1.0), times(0.1, 0.05)),
            "AutoPrune": measurement(times(2.5, 0.1), times(0.5, 0.1)),
            "fastv": "no attention",
        },
    )  # fmt: skip
    return efficiency.model_copy(update=changes)


def test_times_are_linear_in_layers() -> None:
    composed = compose(table(1), table(3), 32)
    assert list(composed) == ["full", "AutoPrune"]
    full = [figure.value for figure in composed["full"]]
    assert full == pytest.approx([1.0, 2.0, 34.0, 1.0, 1.0, 1.7 / 34.0])
    pruned = [figure.value for figure in composed["AutoPrune"]]
    assert pruned == pytest.approx([0.1, 2.5, 5.7, 10.0, 34.0 / 5.7, 3.7 / 5.7])
    gain = composed["AutoPrune"][4]
    assert gain.low < gain.value < gain.high


MORE = {name: measurement((1.0,) * 4, (1.0,) * 4) for name in ("full", "AutoPrune")}


@pytest.mark.parametrize(
    ("deep", "why"),
    [
        (table(3, budget=160), "differ"),
        (table(3, digests={"full": None, "AutoPrune": "cd"}), "differ"),
        (table(1), "shallow one first"),
        (table(3, arms=MORE), "numbers"),
    ],
)
def test_tables_that_do_not_belong_together_are_refused(deep: Efficiency, why: str) -> None:
    with pytest.raises(BenchmarkError, match=why):
        compose(table(1), deep, 32)


def test_files_are_composed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"{layers}.json" for layers in (1, 3)]
    for layers, path in zip((1, 3), paths, strict=True):
        path.write_text(table(layers).model_dump_json())
    assert main(["depth", *map(str, paths)]) == 0
    printed = capsys.readouterr().out
    assert "composed for 32 language layers from measurements of 1 and 3; 3 requests" in printed
    assert "| AutoPrune | 100.0 (" in printed
    assert main(["depth", *map(str, reversed(paths))]) == 1


@pytest.mark.parametrize("content", [None, "", "[]", '{"model": "llava-next-7b"}'])
def test_an_invalid_table_is_refused_in_one_line(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "1.json"
    if content is not None:
        path.write_text(content)
    assert main(["depth", str(path), str(path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
