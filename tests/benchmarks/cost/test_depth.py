"""Times at full depth, extrapolated from two tables; tables that cannot be combined."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common import BenchmarkError
from benchmarks.cost.__main__ import main
from benchmarks.cost.depth import Efficiency, compose, markdown, read_efficiency

NOISE = (-0.02, 0.0, 0.01)


def table(layers: int) -> Efficiency:
    """TTFT at zero layers and per layer: stock 2 s + 1 s, later 0.1 s + 0.05 s; pruned 2.5 s or
    0.5 s + 0.1 s.
    """
    return Efficiency(
        "llava-next-7b",
        layers,
        320,
        {"full": None, "AutoPrune": "ab"},
        {
            "full": tuple(2.0 + 1.0 * layers + noise for noise in NOISE),
            "AutoPrune": tuple(2.5 + 0.1 * layers + noise for noise in NOISE),
        },
        {
            "full": tuple(0.1 + 0.05 * layers + noise for noise in NOISE),
            "AutoPrune": tuple(0.5 + 0.1 * layers + noise for noise in NOISE),
        },
    )


def test_times_are_linear_in_layers() -> None:
    composed = compose(table(1), table(3), 32)

    assert composed["full"].layer.value == pytest.approx(1.0)
    assert composed["full"].fixed.value == pytest.approx(2.0)
    assert composed["full"].ttft.value == pytest.approx(34.0)
    assert composed["full"].ttft_gain.value == composed["full"].prefill_gain.value == 1.0
    pruned = composed["AutoPrune"]
    assert pruned.prefill_gain.value == pytest.approx(10.0)
    assert pruned.ttft_gain.value == pytest.approx(34.0 / 5.7)
    assert pruned.ttft_gain.low < pruned.ttft_gain.value < pruned.ttft_gain.high
    assert composed["full"].again.value == pytest.approx(1.7 / 34.0)
    assert pruned.again.value == pytest.approx(3.7 / 5.7)
    assert "| AutoPrune | 100.0 (" in markdown(table(1), table(3), 32, composed)


@pytest.mark.parametrize(
    ("deep", "why"),
    [
        (replace(table(3), budget=160), "differ"),
        (replace(table(3), digests={"full": None, "AutoPrune": "cd"}), "differ"),
        (table(1), "shallow one first"),
        (replace(table(3), again={"full": (1.0,), "AutoPrune": (1.0,)}), "different numbers"),
        (replace(table(3), ttft={"full": (1.0,), "AutoPrune": (1.0,)}), "different numbers"),
    ],
)
def test_tables_that_do_not_belong_together_are_refused(deep: Efficiency, why: str) -> None:
    with pytest.raises(BenchmarkError, match=why):
        compose(table(1), deep, 32)


def test_files_are_read_and_arms_that_were_refused_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for layers in (1, 3):
        one = table(layers)
        passes = {
            arm: [{"ttft": times, "again": one.again[arm]}] for arm, times in one.ttft.items()
        }
        content = {
            "model": one.model, "layers": layers, "budget": 320, "digests": dict(one.digests),
            "passes": {**passes, "fastv": [{"reason": "no attention"}]},
        }  # fmt: skip
        paths.append(tmp_path / f"{layers}.json")
        paths[-1].write_text(json.dumps(content))

    assert list(read_efficiency(paths[0]).ttft) == ["full", "AutoPrune"]
    assert main(["depth", *map(str, paths)]) == 0
    assert "composed for 32 language layers from measurements of 1 and 3" in capsys.readouterr().out
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
