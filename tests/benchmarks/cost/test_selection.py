"""Selection measurements: the published baseline, alternating times, verdicts on given times."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cost.__main__ import main
from benchmarks.cost.selection import (
    _format_loops,
    _measure_alternately,
    _measure_loops,
    _select_as_published,
    _select_tokens,
    _Size,
    _Times,
)
from tests.golden.case import load, names
from vllm_autoprune.tpdsl.tokens import Grid, Instruction, VisualTokens

SMALL, LARGE = _Size(36, 1, 2, 6), _Size(576, 1, 1, 64)
SOUND = [
    name
    for name in names("cdpruner")
    if load(name).recipe["stable_order"] and not load(name).recipe["note"]
]


@pytest.mark.parametrize("name", SOUND)
def test_the_baseline_reproduces_golden_cases(name: str) -> None:
    case = load(name)
    features = case.inputs["image_features"].to(case.dtype)
    tiles, count, width = features.shape
    patches = case.inputs["image_embeds"].reshape(1, tiles * count, -1)
    used = torch.ones(1, case.inputs["text_embeds"].shape[0], dtype=torch.bool)
    instruction = Instruction(patches, case.inputs["text_embeds"][None], used, -1)
    flat = features.view(1, tiles * count, width)
    tokens = VisualTokens(flat, Grid(1, count, tiles), None, instruction)
    expected = torch.from_numpy(case.expected["order"]).long()
    picks = (expected + count * torch.arange(tiles)[:, None]).flatten().sort().values
    published = _select_as_published(tokens, tiles * case.recipe["K"])
    assert published[0].tolist() == picks.tolist()


@pytest.mark.parametrize("size", [_Size(64, 1, 3, 16), _Size(36, 5, 2, 30), _Size(144, 1, 1, 24)])
def test_our_selection_equals_the_baseline(size: _Size) -> None:
    tokens = size.draw_tokens(dtype=torch.float32)
    ours = _select_tokens(tokens, size.kept).sort(dim=1).values
    assert ours.tolist() == _select_as_published(tokens, size.kept).tolist()


def test_every_second_round_is_reversed() -> None:
    order: list[str] = []
    works = {name: lambda name=name: order.append(name) for name in "abc"}
    times = _measure_alternately(works, 3, warm_up=1)
    assert "".join(order) == "abc" + "abc" + "cba" + "abc"
    assert all(len(times[name]) == 3 and min(times[name]) >= 0 for name in "abc")


def times(ours: float) -> _Times:
    return {"published": [1.6] * 9, "ours": [ours] * 9}


@pytest.mark.parametrize(
    ("device", "by_size", "verdict", "worst"),
    [
        ("cpu", {LARGE: times(1.2), SMALL: times(1.7)}, "**does not hold**", SMALL),
        ("cuda", {LARGE: times(0.3)}, "**holds**", LARGE),
        ("cuda", {LARGE: times(0.3), SMALL: times(1.2)}, "**does not hold**", SMALL),
    ],
)
def test_the_worst_size_decides(
    device: str, by_size: dict[_Size, _Times], verdict: str, worst: _Size
) -> None:
    text = _format_loops(device, by_size, dict.fromkeys(by_size, 1.0))
    assert f" at {worst}: {verdict}" in text
    assert text.count("| 100.0 | 9 |") == len(by_size)


def test_a_size_is_measured_and_its_picks_compared() -> None:
    text = _measure_loops("cpu", [SMALL])
    (row,) = (line for line in text.splitlines() if line.startswith(f"| {SMALL} |"))
    assert float(row.split(" | ")[4]) > 80 and row.endswith(" | 31 |")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selection", "--gpu"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "CUDA" in captured.err
