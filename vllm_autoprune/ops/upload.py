"""Copies from the host to a device that do not wait for the device's work."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device; on a CPU it is the tensor itself.

    A plain ``values.to(device)`` or ``torch.tensor(..., device=device)`` returns only once a GPU
    has finished all its work, because the copy is made from memory that is not pinned.
    """
    staged = values.pin_memory() if device.type == "cuda" else values
    return staged.to(device, non_blocking=True)
