"""Arithmetic added to Triton's interpreter: bfloat16 rounds like torch, comparisons are masks."""

from __future__ import annotations

import torch

from tests.serving.interpreter.triton_interpreted.arithmetic import rounded, widened


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
