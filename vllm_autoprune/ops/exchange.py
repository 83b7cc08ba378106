"""Exchanges of kept tokens for better ones, by a device's fastest implementation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_autoprune.ops.exchange_torch import Exchange, exchange_torch


def exchange_tokens(call: Exchange) -> Tensor:
    """Token ``(B, q)`` that enters at each exchange, or -1, as :class:`Exchange` says.

    On a CUDA device all exchanges are one launch of a Triton kernel, if Triton works there.
    """
    return fastest_exchange(call.cosine.device, call.cosine.shape[1])(call)


def fastest_exchange(device: torch.device, tokens: int) -> Callable[[Exchange], Tensor]:
    """The fastest implementation of :class:`Exchange` that works on a device, for N tokens."""
    if device.type != "cuda":
        return exchange_torch
    try:
        from vllm_autoprune.ops.exchange_triton import exchange_triton, works
    except ImportError:
        return exchange_torch
    return exchange_triton if works(tokens) else exchange_torch
