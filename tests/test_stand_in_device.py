"""The stand-in for a GPU refuses what a GPU would wait for, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.stand_in_device import DEVICE, WaitsForDevice, forbid_waiting

ON_DEVICE = torch.zeros(3, 3, device=DEVICE)
ON_HOST = torch.zeros(3, 3)

Call = Callable[[], object]

WAITING: dict[str, Call] = {
    "a new tensor of host data": lambda: torch.tensor([1, 2], device=DEVICE),
    "a tensor like another of host data": lambda: ON_DEVICE.new_tensor([1, 2]),
    "an upload": lambda: ON_HOST.to(DEVICE),
    "an upload into a tensor": lambda: ON_DEVICE.copy_(ON_HOST),
    "a list as index": lambda: ON_DEVICE[:, [0, 2]],
    "an index on the host": lambda: ON_DEVICE[torch.tensor([0, 2])],
    "a sum of both": lambda: ON_DEVICE + ON_HOST,
    "a download that is used at once": lambda: ON_DEVICE.to("cpu", non_blocking=True),
    "a download": lambda: ON_HOST.clone().copy_(ON_DEVICE),
}

READING: dict[str, Call] = {
    "a number": lambda: int(ON_DEVICE.sum()),
    "a condition": lambda: bool((ON_DEVICE > 0).any()),
    "all numbers": lambda: ON_DEVICE.tolist(),
    "as many as there are": lambda: ON_DEVICE.nonzero(),
    "a mask as index": lambda: ON_DEVICE[ON_DEVICE > 0],
}

ALLOWED: dict[str, Call] = {
    "a staged upload": lambda: ON_HOST.to(DEVICE, non_blocking=True),
    "a tensor of the host": lambda: torch.tensor([1, 2]),
    "an index on the device": lambda: ON_DEVICE[torch.zeros(2, dtype=torch.int64, device=DEVICE)],
    "a number of the host": lambda: ON_DEVICE * torch.tensor(2.0),
    "a download that is read later": lambda: ON_HOST.clone().copy_(ON_DEVICE, non_blocking=True),
    "constants": lambda: torch.where(ON_DEVICE > 0, 1.0, 0.0),
}


@pytest.mark.parametrize("call", [*WAITING.values(), *READING.values()], ids=[*WAITING, *READING])
def test_calls_that_wait_raise(call: Call) -> None:
    # PyTorch itself refuses to read values of a tensor without data.
    errors = (RuntimeError, NotImplementedError) if call in READING.values() else ()
    with forbid_waiting(), pytest.raises((WaitsForDevice, *errors)):
        call()


@pytest.mark.parametrize("call", ALLOWED.values(), ids=ALLOWED)
def test_other_calls_work(call: Call) -> None:
    with forbid_waiting():
        call()
