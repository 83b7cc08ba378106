"""Triton kernels on this machine's GPU: whether one works there, and compiling them at start-up."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from vllm_autoprune.ops.dpp import fastest_implementation
from vllm_autoprune.ops.farthest import fastest_walk

logger = logging.getLogger("vllm.autoprune")


def agrees(trial: Callable[[], bool], kernel: str) -> bool:
    """Whether ``trial``, which compiles and runs a kernel and compares it with torch, succeeds.

    Triton needs a C compiler and a compatible driver, which a serving image may lack. A failure is
    logged with the kernel's name.
    """
    try:
        return trial()
    # Whatever Triton, its C compiler or the driver raises, the torch implementation still works.
    except Exception as error:  # noqa: BLE001
        logger.warning("%s runs in torch, not in Triton: %s", kernel, error)
        return False


def compile_for(tokens: int, device: torch.device) -> None:
    """Compile what greedy selection runs for up to N tokens, so that no image waits for it."""
    for power in range((tokens - 1).bit_length() + 1):
        size = 1 << power
        fastest_walk(device, size)
        fastest_implementation(device, size, 1)
        fastest_implementation(device, size, size)
