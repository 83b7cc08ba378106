"""The tables of a machine with a GPU, with the host in its place."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import pytest
import torch

from benchmarks.cost import efficiency, gpu
from benchmarks.cost.selection import NO_GPU
from benchmarks.cost.selection import gpu as loops
from benchmarks.cost.selection.images import Size
from vllm_autoprune.ops.dpp_torch import greedy_map_torch
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

SMALL = Size(36, 1, 2, 6)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_loops_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_autoprune.ops import dpp_triton

    monkeypatch.setattr(dpp_triton, "greedy_map_triton", greedy_map_torch)
    head, _, row, _ = gpu.measure_loops([SMALL], 2, "cpu")
    assert len(cells(row)) == len(cells(head))
    assert cells(row)[0] == str(SMALL) and cells(row)[-1] == "100.0%"


def test_every_base_policy_has_a_line() -> None:
    head, _, *rows = gpu.measure_policies([SMALL, Size(16, 2, 1, 8)], 1, "cpu")
    assert cells(head)[1:] == [str(SMALL), "32 (2 x 16) → 8, batch 1"]
    assert [cells(row)[0] for row in rows if row] == [f"`{name}`" for name in sorted(BASE_POLICIES)]
    assert all(float(cell) > 0 for row in rows if row for cell in cells(row)[1:])


def test_what_cannot_be_measured_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = argparse.Namespace(quick=False, out=Path("unused"))
    if not torch.cuda.is_available():
        assert gpu.run(options) == NO_GPU
        assert "no CUDA device here" in capsys.readouterr().err

    from vllm_autoprune.ops import dpp_triton

    find, absent = importlib.util.find_spec, set[str]()
    monkeypatch.setattr(loops, "find_missing_requirement", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(dpp_triton, "works", lambda: False)
    monkeypatch.setattr(gpu, "measure_policies", lambda *_: iter(["the policies"]))
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent else find(name)
    )
    served: list[argparse.Namespace] = []

    def serve(chosen: argparse.Namespace) -> int:
        served.append(chosen)
        return 0

    monkeypatch.setattr(efficiency, "run", serve)

    def tables() -> str:
        assert gpu.run(options) == 0
        return capsys.readouterr().out

    assert "Triton does not work" in tables() and len(served) == 1
    assert (served[0].layers, served[0].policies) == (32, "")
    absent.add("vllm")
    assert "the policies" in tables() and "vLLM is not installed" in tables()
    absent.add("pydantic")
    assert "pydantic is not installed" in tables()
    absent.clear()
    monkeypatch.setattr(gpu, "SECONDS", 100)
    assert "two servers need" in tables() and len(served) == 1
