"""Compilation of the Triton kernels before a request needs them."""

from __future__ import annotations

import torch

from vllm_autoprune.ops.dpp import fastest_implementation
from vllm_autoprune.ops.exchange import fastest_exchange
from vllm_autoprune.ops.farthest import fastest_walk


def compile_for(tokens: int, device: torch.device) -> None:
    """Compile what greedy selection runs for up to N tokens, so that no image waits for it."""
    for power in range((tokens - 1).bit_length() + 1):
        size = 1 << power
        fastest_walk(device, size)
        fastest_exchange(device, size)
        fastest_implementation(device, size, 1)
        fastest_implementation(device, size, size)
