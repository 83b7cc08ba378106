"""Selection measurements: picks of the published code, a measured size, verdicts on given times."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cost.__main__ import main
from benchmarks.cost.selection import (
    BatchSize,
    _format_table,
    _Measurement,
    _select_as_published,
)
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

SMALL = BatchSize(36, 1, 2, 6)
LARGE = BatchSize(576, 1, 1, 64)


@pytest.mark.parametrize(
    "size", [BatchSize(64, 1, 3, 16), BatchSize(36, 5, 2, 30), BatchSize(144, 1, 1, 24)]
)
def test_our_selection_equals_the_published_one(size: BatchSize) -> None:
    """Ours equals golden cases of the published code, and so does what it is compared with."""
    tokens = size.draw_tokens(dtype=torch.float32)
    base = BASE_POLICIES["cdpruner"]
    ours = base.select(base.default_params, tokens, size.kept).picks.sort(dim=1).values
    assert ours.tolist() == _select_as_published(tokens, size.kept).tolist()


@pytest.mark.parametrize(
    ("device", "seconds", "verdict", "worst"),
    [
        ("cpu", {LARGE: 1.2, SMALL: 1.7}, "**does not hold**", SMALL),
        ("cuda", {LARGE: 0.3}, "**holds**", LARGE),
        ("cuda", {LARGE: 0.3, SMALL: 1.2}, "**does not hold**", SMALL),
    ],
)
def test_the_worst_size_decides(
    device: str, seconds: dict[BatchSize, float], verdict: str, worst: BatchSize
) -> None:
    rows = [_Measurement(size, [1.6] * 9, [ours] * 9) for size, ours in seconds.items()]
    text = _format_table(device, rows)
    assert f" at {worst}: {verdict}" in text and text.count("| 100.0 | 9 |") == len(
        rows
    )


def test_a_size_is_measured_and_its_picks_compared() -> None:
    measured = _Measurement.of(SMALL, "cpu")
    assert (
        len(measured.ours) == len(measured.published) == 31 and min(measured.ours) > 0
    )
    assert measured.alike > 0.8


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_ends_with_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["selection", "--gpu"]) == 1
    captured = capsys.readouterr()
    assert (
        captured.out == "" and captured.err.count("\n") == 1 and "CUDA" in captured.err
    )
