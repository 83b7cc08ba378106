"""Selection measurements: baseline, alternating times, verdicts on hand-written times, commands."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from benchmarks.cost import efficiency, gpu
from benchmarks.cost.__main__ import main
from benchmarks.cost.selection import (
    FULL_LAYER,
    LAYER,
    LLAVA,
    Images,
    Section,
    Size,
    TokenSource,
    build_policies,
    build_policy,
    build_selection,
    draw_images,
    measure_alternately,
)
from tests.golden.case import load, names
from vllm_autoprune.ops import dpp_triton
from vllm_autoprune.ops.dpp_torch import greedy_map_torch
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

SMALL = Size(36, 1, 2, 6)
SOUND = [
    name
    for name in names("cdpruner")
    if load(name).recipe["stable_order"] and not load(name).recipe["note"]
]


@pytest.mark.parametrize("name", SOUND)
def test_the_baseline_reproduces_golden_cases(name: str) -> None:
    case = load(name)
    features = case.inputs["image_features"].to(case.dtype)
    patches, text = case.inputs["image_embeds"], case.inputs["text_embeds"]
    tiles, tokens, width = features.shape
    images = Images(
        Size(tokens, tiles, 1, tiles * case.recipe["K"]),
        features.view(1, tiles * tokens, width),
        patches.reshape(1, tiles * tokens, -1),
        text[None],
        torch.zeros(1, tiles * tokens),
    )
    expected = torch.from_numpy(case.expected["order"]).long()
    assert images.select_as_published().tolist() == expected.sort(dim=1).values.tolist()


@pytest.mark.parametrize("size", [Size(64, 1, 3, 16), Size(36, 5, 2, 30), Size(144, 1, 1, 24)])
def test_our_selection_equals_the_baseline(size: Size) -> None:
    images = draw_images(size, dtype=torch.float32)
    offset = torch.arange(size.tiles).repeat(size.batch)[:, None] * size.per_tile
    expected = (images.select_as_published() + offset).reshape(size.batch, -1)
    picks = images.select(build_policy(size.kept, exchange=False))
    assert picks.sort(dim=1).values.tolist() == expected.tolist()


def test_every_second_round_is_reversed() -> None:
    order: list[str] = []
    works = {name: lambda name=name: order.append(name) for name in "abc"}
    times = measure_alternately(works, 3, warm_up=1)
    assert "".join(order) == "abc" + "abc" + "cba" + "abc"
    assert all(len(times[name]) == 3 and min(times[name]) >= 0 for name in "abc")


def verdicts(section: Section) -> list[str]:
    return [verdict for _, _, verdict in section.claims]


def test_the_worst_size_decides() -> None:
    good = {"published": [1.6] * 9, "ours": [1.2] * 9}
    slow = {"published": [1.6] * 9, "ours": [1.7] * 9}
    assert verdicts(build_selection({Size(576, 1, 1, 64): good})) == ["holds"]
    both = build_selection({Size(576, 1, 1, 64): good, SMALL: slow})
    assert verdicts(both) == ["does not hold"]
    _, measured, _ = both.claims[0]
    assert "does not hold at 1 of 2 sizes, holds at 1 of 2 sizes" in measured
    assert str(SMALL) in measured


@pytest.mark.parametrize(("selection", "verdict"), [(0.02, "holds"), (0.2, "does not hold")])
def test_every_policy_has_a_share_of_the_prefill(selection: float, verdict: str) -> None:
    layers = {LAYER: [0.1] * 9, FULL_LAYER: [0.5] * 9}
    alone = {"divprune": [selection] * 9, "cdpruner": [0.01] * 9, "fastv": [0.01] * 9}
    section = build_policies({LLAVA[1]: alone | layers})
    assert verdicts(section) == [verdict]
    assert "`divprune` is slowest" in section.claims[0][1]
    # A prefill is 32 layers; FastV runs one over all tokens: 0.51 of 3.2 seconds.
    assert {row[0]: row[-1] for row in section.table.rows} == {
        "`cdpruner`": "0.31",
        "`divprune`": f"{selection / 0.032:.2f}",
        "`fastv`": "15.94",
    }


@pytest.mark.parametrize("name", sorted(BASE_POLICIES))
def test_every_policy_runs_on_the_measured_images(name: str) -> None:
    assert TokenSource(Size(16, 5, 1, 8)).select(name).picks.shape[0] == 1


def test_a_quick_run_prints_its_section(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.cost.selection.list_sizes", lambda quick: [SMALL])
    assert main(["selection", "--only", "selection", "--quick", "--json"]) == 0
    (section,) = json.loads(capsys.readouterr().out)
    assert section["name"] == "selection"
    assert section["claims"][0]["verdict"] in ("holds", "does not hold", "inconclusive")
    assert set(section["data"][str(SMALL)]) == {"published", "ours"}
    assert main(["selection", "--only", "selection", "--quick"]) == 0
    assert "## Selection against the published loop" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["selection", "gpu"], ["gpu"]])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_command_exits_with_one_line(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == gpu.NO_GPU
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "CUDA" in captured.err


def test_tables_of_a_gpu_have_a_line_for_every_loop_and_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dpp_triton, "greedy_map_triton", greedy_map_torch)
    line = gpu.format_loops([SMALL], 2, "cpu").splitlines()[-1]
    assert line.startswith(f"| {SMALL} | ") and line.endswith(" | 100.0% |")
    rows = gpu.format_policies([SMALL, Size(16, 2, 1, 8)], 1, "cpu").splitlines()
    assert "32 (2 x 16) → 8, batch 1" in rows[0]
    assert [row.split(" | ")[0] for row in rows[2:]] == [f"| `{n}`" for n in sorted(BASE_POLICIES)]


def test_what_a_gpu_cannot_measure_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = argparse.Namespace(command="gpu", quick=False, out=Path("unused"))
    find, served = importlib.util.find_spec, list[argparse.Namespace]()
    monkeypatch.setattr(gpu, "find_missing_requirement", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(dpp_triton, "works", lambda: False)
    monkeypatch.setattr(gpu, "format_policies", lambda *_: "the policies")

    def serve(chosen: argparse.Namespace) -> int:
        served.append(chosen)
        return 0

    monkeypatch.setattr(efficiency, "run", serve)

    def tables() -> str:
        assert gpu.run(options) == 0
        return capsys.readouterr().out

    assert "Triton does not work" in tables() and len(served) == 1
    assert (served[0].layers, served[0].policies) == (32, "")
    monkeypatch.setattr(gpu, "SECONDS", 100)
    assert "two servers need" in tables()
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "vllm" else find(n))
    printed = tables()
    assert "the policies" in printed and "vLLM is not installed" in printed and len(served) == 1
