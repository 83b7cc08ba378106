"""Selections by kernels and by loops: both are timed, and promises are judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.cost import kernels
from benchmarks.cost.__main__ import main
from benchmarks.cost.selection import BatchSize
from vllm_autoprune.ops import dpp, farthest
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES


def test_every_policy_is_timed_at_every_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["kernels", "--sizes", "5x16:10,64:8", "--rounds", "3"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for size in ("80 (5 x 16) → 10, batch 1", "64 → 8, batch 1"):
        assert text.count(f" | {size} | ") == 4
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert len(rows) == 8 and {row["alike"] for row in rows} == {1.0}
    assert all(len(row["kernel"]) == len(row["loop"]) == 3 for row in rows)
    assert main(["kernels", "--sizes", "64"]) == 1
    assert "write 4096:512" in capsys.readouterr().err


def test_the_loop_is_torch_even_where_a_kernel_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine on which every selection would be by a kernel, which is not there."""
    for module, name in ((farthest, "fastest_walk"), (dpp, "fastest_implementation")):
        monkeypatch.setattr(module, name, lambda *_: None)
    size = BatchSize(64, 1, 1, 8)
    tokens = size.draw_tokens()
    for policy in ("divprune", "cdpruner"):
        base = BASE_POLICIES[policy]
        with pytest.raises(TypeError):
            base.select(base.default_params, tokens, 8)
        with kernels._torch_loops():
            base.select(base.default_params, tokens, 8)


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(0.0029, "holds"), (0.0031, "does not hold")]
)
def test_a_promise_is_of_one_size(seconds: float, verdict: str) -> None:
    times = (seconds,) * 5
    size = BatchSize(4096, 1, 1, 512)
    measured = kernels._Measurement("divprune", size, times, (0.03,) * 5, 1.0, 1 << 20)
    assert measured.promise == (0.003, verdict)
    assert measured.format_row()[-2:] == ["1", f"3 ms: {verdict}"]
    assert measured.ratio.value == pytest.approx(0.03 / seconds)
    other = BatchSize(576, 5, 1, 320)
    assert (
        kernels._Measurement("divprune", other, times, times, 1.0, None).promise is None
    )
