"""The stand-in for a GPU refuses what a GPU would wait for, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.stand_in_device import DEVICE, WaitsForDevice, forbid_waiting

DEVICE_ROWS, HOST_ROWS = torch.zeros(3, 3, device=DEVICE), torch.zeros(3, 3)

WAITING: dict[str, Callable[[], object]] = {
    "a new tensor of host data": lambda: torch.tensor([1, 2], device=DEVICE),
    "a tensor like another of host data": lambda: DEVICE_ROWS.new_tensor([1, 2]),
    "an upload": lambda: HOST_ROWS.to(DEVICE),
    "an upload into a tensor": lambda: DEVICE_ROWS.copy_(HOST_ROWS),
    "a list as index": lambda: DEVICE_ROWS[:, [0, 2]],
    "an index on the host": lambda: DEVICE_ROWS[torch.tensor([0, 2])],
    "a sum of both": lambda: DEVICE_ROWS + HOST_ROWS,
    "a download that is used at once": lambda: DEVICE_ROWS.to("cpu", non_blocking=True),
    "a download": lambda: HOST_ROWS.clone().copy_(DEVICE_ROWS),
    "a number": lambda: int(DEVICE_ROWS.sum()),
    "a mask as index": lambda: DEVICE_ROWS[DEVICE_ROWS > 0],
}


@pytest.mark.parametrize("call", WAITING.values(), ids=WAITING)
def test_calls_that_wait_raise(call: Callable[[], object]) -> None:
    # PyTorch itself refuses to read values of a tensor without data.
    with forbid_waiting(), pytest.raises((WaitsForDevice, RuntimeError, NotImplementedError)):
        call()


def test_other_calls_work() -> None:
    with forbid_waiting():
        HOST_ROWS.to(DEVICE, non_blocking=True)
        HOST_ROWS.clone().copy_(DEVICE_ROWS, non_blocking=True)
        DEVICE_ROWS[torch.zeros(2, dtype=torch.int64, device=DEVICE)] * torch.tensor(2.0)
        torch.where(DEVICE_ROWS > 0, 1.0, 0.0)
