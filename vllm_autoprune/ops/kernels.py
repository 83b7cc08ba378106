"""Whether a Triton kernel works on this machine's GPU: its compiler or driver may be missing."""

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
