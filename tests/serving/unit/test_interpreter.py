"""Arithmetic added to Triton's interpreter: bfloat16 rounds like torch, comparisons are masks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.serving.interpreter.triton_interpreted.arithmetic import rounded, widened

_MASKED_STORE = """
import torch, triton, triton.language as tl
from triton_interpreted.arithmetic import fix
fix()

@triton.jit
def store_below_three(out, switch, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(out + index, index + 1, mask=(index < 3) & (switch > 0))

for switch in (0, 1):
    out = torch.zeros(8, dtype=torch.int32)
    store_below_three[(1,)](out, switch, 8)
    print(out.tolist())
"""


def test_every_bfloat16_survives_a_round_trip() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    wide = torch.from_numpy(widened(every.view(torch.uint16).numpy()))
    assert torch.equal(wide.nan_to_num(7.0), every.float().nan_to_num(7.0))
    back = torch.from_numpy(rounded(wide.numpy())).view(torch.bfloat16)
    assert torch.equal(back.nan_to_num(7.0), every.nan_to_num(7.0))
    assert torch.equal(back.isnan(), every.isnan())


def test_rounding_equals_torch() -> None:
    torch.manual_seed(0)
    values = torch.cat([torch.randn(10_000), torch.tensor([1.00390625, 1.01171875, 3.4e38, 1e-40])])
    result = torch.from_numpy(rounded(values.numpy())).view(torch.bfloat16)
    assert torch.equal(result, values.bfloat16())


def test_a_scalar_comparison_is_part_of_a_mask(tmp_path: Path) -> None:
    script = tmp_path / "masked_store.py"
    script.write_text(_MASKED_STORE)
    path = str(Path(__file__).parents[1] / "interpreter")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [str([0] * 8), str([1, 2, 3, 0, 0, 0, 0, 0])], done.stderr
