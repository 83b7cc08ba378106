"""The tools of the selection measurements: alternating times, peak memory, command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.cost.__main__ import build_parser, main
from benchmarks.cost.selection import NO_GPU, gpu
from benchmarks.cost.selection.images import WIDTH
from benchmarks.cost.selection.memory import measure_peak
from benchmarks.cost.selection.share import HEADS, Layer, _rotate
from benchmarks.cost.selection.timing import measure_alternately

ROOT = Path(__file__).resolve().parents[4]


def test_every_second_round_is_reversed() -> None:
    order: list[str] = []
    works = {name: lambda name=name: order.append(name) for name in "abc"}
    times = measure_alternately(works, 3, warm_up=1)
    assert "".join(order) == "abc" + "abc" + "cba" + "abc"
    assert all(len(times[name]) == 3 and min(times[name]) >= 0 for name in "abc")


def test_peak_memory_counts_live_allocations() -> None:
    ones = torch.ones(1000, 1000)
    one_at_a_time = measure_peak(lambda: [(ones + i).sum() for i in range(3)])
    all_at_once = measure_peak(lambda: sum((ones + 1, ones + 2), ones))
    assert 4_000_000 <= one_at_a_time < 4_100_000
    assert 12_000_000 <= all_at_once < 16_100_000


def test_a_layer_attends_to_earlier_tokens_alone() -> None:
    with torch.inference_mode():
        layer = Layer(torch.float32)
        for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
            linear.weight.mul_(0.1)
        rows = torch.randn(4, WIDTH)
        changed = rows.clone()
        changed[3] += 1
        first, second = layer(rows), layer(changed)
    assert torch.allclose(first[:3], second[:3], atol=1e-5)
    assert not torch.allclose(first[3], second[3], atol=1e-3)


def test_rotary_embedding_keeps_norms_and_the_first_token() -> None:
    heads = torch.randn(HEADS, 5, 16)
    turned = _rotate(heads)
    assert torch.allclose(turned.norm(dim=-1), heads.norm(dim=-1), atol=1e-5)
    assert torch.allclose(turned[:, 0], heads[:, 0]) and not torch.allclose(turned, heads)


def test_without_a_gpu_the_command_exits_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        assert gpu.find_missing_requirement() is None
        return
    assert main(["selection", "gpu"]) == NO_GPU
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "CUDA" in captured.err


def test_the_gpu_s_run_imports_torch_and_triton_but_no_engine_and_no_pydantic() -> None:
    code = (
        "import sys\n"
        "sys.modules['pydantic'] = None\n"
        "import importlib.util as util\n"
        "real = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'pydantic' else real(name, *more)\n"
        "from benchmarks.cost import __main__\n"
        "from benchmarks.cost.selection import gpu\n"
        "gpu.import_package_without_init()\n"
        "from vllm_autoprune.ops import dpp, dpp_triton, similarity\n"
        "print([n for n in ('vllm', 'transformers', 'numpy.random') if n in sys.modules][:2])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert "vllm" not in ran.stdout and "transformers" not in ran.stdout


def test_the_command_line_has_defaults() -> None:
    parser = build_parser("selection")
    assert parser.parse_args(["selection"]).device == "cpu"
    assert parser.parse_args(["selection", "--only", "memory", "--quick"]).only == "memory"


def test_a_quick_run_prints_its_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selection", "--only", "memory", "--quick", "--json"]) == 0
    (section,) = json.loads(capsys.readouterr().out)
    assert section["name"] == "memory" and section["claims"][0]["verdict"] == "holds"
