"""Greedy MAP as a Triton kernel: all K steps of all images of a batch in a single launch.

One program per image (or tile) keeps the residuals of all tokens in registers and the Cholesky
factors in global memory, where they stay cached: 147 kB at N = 576 and K = 64. The published loop
launches about ten kernels per step, so that launch latency dominates.

Tested against the torch implementation on CPU tensors with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import functools
import logging

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_autoprune.ops.greedy import DIVISOR, EXHAUSTED, HUGE, UNIT, Conditioned, greedy_map_torch
from vllm_autoprune.ops.rowwise import TIE

logger = logging.getLogger("vllm.autoprune")

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_TILE = 16384
"""Factors that a program reads at once: 32 or 64 registers per thread."""


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _greedy_map(
    similarity: tl.tensor,
    quality: tl.tensor,
    eligible: tl.tensor,
    anchors: tl.tensor,
    residuals: tl.tensor,
    factors: tl.tensor,
    picks: tl.tensor,
    tokens: tl.tensor,
    count: tl.tensor,
    forced: tl.tensor,
    fixed: tl.tensor,
    exhausted: tl.tensor,
    divisor: tl.tensor,
    huge: tl.tensor,
    unit: tl.tensor,
    tie: tl.tensor,
    has_eligible: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
) -> None:
    image = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, block)
    inside = token < tokens
    similarity += image * tokens * tokens
    factors += image * (fixed + count) * tokens
    picks += image * count
    anchors += image * forced

    q = tl.load(quality + image * tokens + token, mask=inside, other=0.0)
    residual = tl.load(residuals + image * tokens + token, mask=inside, other=0.0)
    free = inside
    if has_eligible:
        free = free & (tl.load(eligible + image * tokens + token, mask=inside, other=0) != 0)
    weight = q * q
    spare = tl.where(q == q, tl.minimum(tl.maximum(q, -huge), huge), huge)
    sound = True

    for step in range(count):
        rounded_one = (fixed + step == 0) & (tl.abs(residual - 1.0) <= unit)
        gain = weight * tl.where(free, tl.where(rounded_one, 1.0, residual), -1.0)
        # NaN has to win the maximum, as in torch, and be recognisable: only NaN becomes infinite.
        gain = tl.where(gain == gain, tl.minimum(gain, LARGEST), float("inf"))
        best = tl.max(gain, axis=0)
        near = gain >= tl.minimum(best, best * (1.0 - tie))
        pick = tl.min(tl.where(near, token, block), axis=0)
        if step < forced:
            pick = tl.load(anchors + step).to(tl.int32)
        else:
            sound = sound & (best > exhausted) & (best < float("inf"))
            if not sound:
                pick = tl.argmax(tl.where(free, spare, -float("inf")), axis=0)
        tl.store(picks + step, pick.to(tl.int64))
        free = free & (token != pick)

        update = tl.load(similarity + pick * tokens + token, mask=inside, other=0.0)
        for start in range(0, fixed + step, rows):
            t = start + tl.arange(0, rows)
            pick_factors = tl.load(factors + t * tokens + pick, mask=t < fixed + step, other=0.0)
            written = tl.load(
                factors + t[:, None] * tokens + token[None, :],
                mask=(t < fixed + step)[:, None] & inside[None, :],
                other=0.0,
            )
            update -= tl.sum(pick_factors[:, None] * written, axis=0)
        pivot = tl.sum(tl.where(token == pick, residual, 0.0), axis=0)
        pivot = tl.maximum(pivot, divisor, propagate_nan=tl.PropagateNan.ALL)
        update = update / tl.sqrt(pivot)
        residual -= update * update
        tl.store(factors + (fixed + step) * tokens + token, update, mask=inside)
        # The next step reads values stored by other threads.
        tl.debug_barrier()


def greedy_map_triton(
    similarity: Tensor,
    quality: Tensor,
    count: int,
    anchors: Tensor | None = None,
    eligible: Tensor | None = None,
    conditioned: Conditioned | None = None,
) -> Tensor:
    """Triton implementation of :func:`vllm_autoprune.ops.dpp.greedy_map`."""
    batch, tokens = quality.shape
    picks = torch.empty(batch, count, dtype=torch.int64, device=quality.device)
    if batch == 0 or count == 0:
        return picks
    block, rows, warps = _launch_options(tokens)
    fixed = 0 if conditioned is None else conditioned.factors.shape[1]
    factors = quality.new_empty(batch, fixed + count, tokens)
    if conditioned is None:
        residual = similarity.diagonal(dim1=1, dim2=2).contiguous()
    else:
        residual = conditioned.residual.contiguous()
        factors[:, :fixed] = conditioned.factors
    _greedy_map[(batch,)](
        similarity.contiguous(),
        quality.contiguous(),
        picks if eligible is None else eligible.contiguous(),  # not read if None
        picks if anchors is None else anchors.contiguous(),
        residual,
        factors,
        picks,
        tokens,
        count,
        0 if anchors is None else anchors.shape[1],
        fixed,
        EXHAUSTED,
        DIVISOR,
        HUGE,
        UNIT,
        TIE,
        has_eligible=eligible is not None,
        block=block,
        rows=rows,
        num_warps=warps,
    )
    return picks


def _launch_options(tokens: int) -> tuple[int, int, int]:
    """Block size, factor rows read at once and warps of a program, for N tokens."""
    block = int(triton.next_power_of_2(tokens))
    return block, max(1, min(16, _TILE // block)), min(16, max(4, block // 128))


@functools.cache
def works() -> bool:
    """Whether the kernel compiles and runs on this machine's GPU; tested and logged once.

    Triton needs a C compiler and a compatible driver, which a serving image may lack.
    """
    similarity, quality = torch.eye(3, device="cuda")[None], torch.ones(1, 3, device="cuda")
    try:
        same = greedy_map_triton(similarity, quality, 2).equal(
            greedy_map_torch(similarity, quality, 2)
        )
    except Exception as error:  # whatever Triton raises, the torch implementation works
        logger.warning("Selection runs in torch, not in Triton: %s", error)
        return False
    return same
