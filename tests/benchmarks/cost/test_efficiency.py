"""The efficiency table and its extrapolation to full depth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from benchmarks.common import BenchmarkError
from benchmarks.cost.__main__ import main
from benchmarks.cost.efficiency import (
    DeviceMemory,
    Efficiency,
    Model,
    Pass,
    Refusal,
    compose,
    compute_cost,
    format_table,
)
from vllm_autoprune.backbones import BACKBONE_SHAPES

LLAVA_NEXT_7B = BACKBONE_SHAPES["llava-next-7b"]

MODEL = Model(LLAVA_NEXT_7B.name, Path(), LLAVA_NEXT_7B, LLAVA_NEXT_7B.layers, 672, ())


@pytest.mark.parametrize(
    ("arm", "times_fewer"),
    [("cdpruner", 9.9), ("AutoPrune", 9.9), ("fastv", 7.6), ("pyramiddrop", 2.9),
     ("sparsevlm", 6.1), ("dart", 6.1)],
)  # fmt: skip
def test_layers_that_rank_all_tokens_are_counted(arm: str, times_fewer: float) -> None:
    cost = compute_cost(MODEL, arm, 320, [])
    assert round(MODEL.estimate(2880).flops / cost.flops, 1) == times_fewer
    assert cost.tokens == 320


class Worker(DeviceMemory):
    """A worker on a device that need not exist."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


def test_memory_is_that_of_the_workers_gpu_or_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaks = {"cuda:1": 3 << 20}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[str(device)])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks[str(device)])
    for device, cell in (("cuda:1", "3"), ("cpu", "not measured")):
        worker = Worker(device)
        worker.reset_device_memory()
        row = Pass(ttft=(0.1,), prefill=0.1, decode=(0.01,), prompt_tokens=9, visual_tokens=None,
                   device_memory=worker.peak_device_memory())  # fmt: skip
        refused = Refusal(reason="no attention")
        passes: Mapping[str, list[Pass | Refusal]] = {"full": [row], "fastv": [refused]}
        rows = [line for line in format_table(MODEL, 320, passes).split("\n") if line[:2] == "| "]
        head, _, full, fastv = (line.strip("| ").split(" | ") for line in rows)
        assert full[head.index("GPU memory, MiB")] == cell
        assert fastv[1] == "not served: no attention"


def table(layers: int, **changes: object) -> Efficiency:
    """TTFT at zero layers and per layer: stock 2 s + 1 s, later 0.1 s + 0.05 s; pruned 2.5 s or
    0.5 s + 0.1 s. An arm was not served.
    """

    def times(fixed: float, layer: float) -> tuple[float, ...]:
        return tuple(fixed + layer * layers + noise for noise in (-0.02, 0.0, 0.01))

    def measured(ttft: tuple[float, ...], again: tuple[float, ...]) -> tuple[Pass, ...]:
        return (Pass(ttft=ttft, again=again, prefill=0.1, decode=(0.1,), prompt_tokens=9,
                     visual_tokens=None, device_memory=None),)  # fmt: skip

    passes: dict[str, tuple[Pass | Refusal, ...]] = {
        "full": measured(times(2.0, 1.0), times(0.1, 0.05)),
        "AutoPrune": measured(times(2.5, 0.1), times(0.5, 0.1)),
        "fastv": (Refusal(reason="no attention"),),
    }
    digests = {"full": None, "AutoPrune": "ab"}
    efficiency = Efficiency(
        model="llava-next-7b", layers=layers, budget=320, digests=digests, passes=passes
    )
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


@pytest.mark.parametrize(
    ("deep", "why"),
    [
        (table(3, budget=160), "differ"),
        (table(3, digests={"full": None, "AutoPrune": "cd"}), "differ"),
        (table(1), "shallow one first"),
        (table(3, passes={arm: row * 2 for arm, row in table(3).passes.items()}), "numbers"),
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
    assert "composed for 32 language layers from measurements of 1 and 3" in printed
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
