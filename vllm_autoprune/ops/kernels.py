"""What Triton kernels share: whether one works on this machine's GPU, and sizes of a program."""

from __future__ import annotations

import logging
from collections.abc import Callable

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


_SMALLEST_BLOCK = 128
"""Tokens of the smallest block: one per thread of four warps, the least that a program has."""

_LARGEST_BLOCK = 4096
"""Tokens of the largest block: eight per thread of sixteen warps."""


def block_for(tokens: int) -> int:
    """Tokens that a program reads at once, of N: a power of two of at least 128."""
    power = 1 << max(tokens - 1, 0).bit_length()
    return min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, power))


def warps_for(block: int) -> int:
    """Warps of a program of this block size."""
    return min(16, max(4, block // 128))
