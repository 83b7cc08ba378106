"""Greedy MAP as a Triton kernel: all K steps of all images of a batch in a single launch.

One program per image (or tile) keeps the residuals of all tokens in registers and the Cholesky
factors in global memory, where they stay cached: 147 kB at N = 576 and K = 64. The published loop
launches about ten kernels per step, so that launch latency dominates.

It is compiled once for each block size, a power of two, and for nothing else that differs between
images: compiling takes 0.5 to 3 s.

Tested against the torch implementation on CPU tensors with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import functools
import logging

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_autoprune.ops.greedy import (
    DIVISOR,
    EXHAUSTED,
    HUGE,
    UNIT,
    Conditioned,
    greedy_map_torch,
)
from vllm_autoprune.ops.rowwise import ALIGNED, TIE

logger = logging.getLogger("vllm.autoprune")

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_TILE = 16384
"""Factors that a program reads at once: 32 or 64 registers per thread."""

_SMALLEST_BLOCK = 128
"""Tokens of the smallest block: one for each thread of the four warps that a program has at least.
"""

_ALIGNED = tl.constexpr(ALIGNED)


# Triton would compile an integer anew where it is 1 or divisible by 16, and a tensor where it is
# aligned, as a row of a batch may not be.
@triton.jit(  # type: ignore[untyped-decorator]  # Triton has no types
    do_not_specialize=("tokens", "count", "forced", "fixed"),
    do_not_specialize_on_alignment=(
        "similarity",
        "quality",
        "eligible",
        "anchors",
        "residuals",
    ),
)
def _greedy_map(  # noqa: PLR0913  # a kernel takes flat arguments: pointers, numbers, constants
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
    block: tl.constexpr,
    rows: tl.constexpr,
) -> None:
    # Pointers: similarity (B, N, N); quality, eligible and residuals (B, N); anchors (B, forced);
    # factors (B, fixed + count, width); picks (B, count). All others are numbers.
    image = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, block)  # indices of all tokens
    inside = token < tokens
    # Rows of factors are padded, so that the compiler knows them to be aligned and reads four
    # numbers at once. Padding has no weight.
    width = tl.cdiv(tokens, _ALIGNED) * _ALIGNED
    stored = token < width
    similarity += image * tokens * tokens
    factors += image * (fixed + count) * width
    picks += image * count
    anchors += image * forced

    q = tl.load(quality + image * tokens + token, mask=inside, other=0.0)
    residual = tl.load(residuals + image * tokens + token, mask=inside, other=0.0)
    free = tl.load(eligible + image * tokens + token, mask=inside, other=0) != 0
    weight = q * q
    # What orders tokens once gains tell nothing any more; NaN (q != q) comes first.
    spare = tl.where(q == q, tl.minimum(tl.maximum(q, -huge), huge), huge)
    sound = True

    for step in range(count):
        # Only the first pick of all reads the diagonal itself, where a rounded 1 counts as 1.
        rounded_one = (fixed + step == 0) & (tl.abs(residual - 1.0) <= unit)
        gain = weight * tl.where(free, tl.where(rounded_one, 1.0, residual), -1.0)
        # NaN has to win the maximum, as in torch: it becomes infinity, and infinity LARGEST, so
        # that an infinite gain means NaN.
        gain = tl.where(gain == gain, tl.minimum(gain, LARGEST), float("inf"))
        best = tl.max(gain, axis=0)
        # The lowest index wins among gains that are within a rounding of the best.
        near = gain >= tl.minimum(best, best * (1.0 - tie))
        pick = tl.min(tl.where(near, token, block), axis=0)
        if step < forced:
            pick = tl.load(anchors + step).to(tl.int32)
        else:
            # Once the rank is exhausted, or a gain is NaN, all further picks go by `spare`.
            sound = sound & (best > exhausted) & (best < float("inf"))
            if not sound:
                pick = tl.argmax(tl.where(free, spare, -float("inf")), axis=0)
        tl.store(picks + step, pick.to(tl.int64))
        free = free & (token != pick)

        update = tl.load(similarity + pick * tokens + token, mask=inside, other=0.0)
        for start in range(0, fixed + step, rows):
            t = start + tl.arange(0, rows)
            pick_factors = tl.load(
                factors + t * width + pick, mask=t < fixed + step, other=0.0
            )
            written = tl.load(
                factors + t[:, None] * width + token[None, :],
                mask=(t < fixed + step)[:, None] & stored[None, :],
                other=0.0,
            )
            update -= tl.sum(pick_factors[:, None] * written, axis=0)
        # residual[pick]: registers cannot be indexed.
        pivot = tl.sum(tl.where(token == pick, residual, 0.0), axis=0)
        pivot = tl.maximum(pivot, divisor, propagate_nan=tl.PropagateNan.ALL)
        update = update / tl.sqrt(pivot)
        residual -= update * update
        tl.store(factors + (fixed + step) * width + token, update, mask=stored)
        # The next step reads values stored by other threads.
        tl.debug_barrier()


def greedy_map_triton(
    similarity: Tensor,
    quality: Tensor,
    count: int,
    anchors: Tensor | None = None,
    eligible: Tensor | None = None,
    conditioned: Conditioned | None = None,
    *,
    smallest_block: int = _SMALLEST_BLOCK,
) -> Tensor:
    """Triton implementation of :func:`vllm_autoprune.ops.dpp.greedy_map`.

    ``smallest_block`` is the power of two that a block has at least, 128 or more.
    """
    batch, tokens = quality.shape
    picks = torch.empty(batch, count, dtype=torch.int64, device=quality.device)
    if batch == 0 or count == 0:
        return picks
    block, rows, warps = _launch_options(max(tokens, smallest_block))
    fixed = 0 if conditioned is None else conditioned.factors.shape[1]
    width = -(-tokens // ALIGNED) * ALIGNED
    factors = quality.new_zeros(batch, fixed + count, width)
    if conditioned is None:
        residual = similarity.diagonal(dim1=1, dim2=2).contiguous()
    else:
        residual = conditioned.residual.contiguous()
        factors[:, :fixed, :tokens] = conditioned.factors
    if eligible is None:
        eligible = torch.ones_like(quality, dtype=torch.bool)
    _greedy_map[(batch,)](
        similarity.contiguous(),
        quality.contiguous(),
        eligible.contiguous(),
        picks if anchors is None else anchors.contiguous(),  # not read if None
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
        block=block,
        rows=rows,
        num_warps=warps,
    )
    return picks


def _launch_options(tokens: int) -> tuple[int, int, int]:
    """Block size, factor rows read at once and warps of a program, for N tokens."""
    block = max(_SMALLEST_BLOCK, int(triton.next_power_of_2(tokens)))
    return block, max(1, min(16, _TILE // block)), min(16, max(4, block // 128))


def works(tokens: int = 1) -> bool:
    """Whether the kernel compiles and runs on this machine's GPU for N tokens.

    Tested, and a failure logged, once for each block size.
    """
    block, _, _ = _launch_options(tokens)
    return _block_works(block)


@functools.cache
def _block_works(block: int) -> bool:
    """Triton needs a C compiler and a compatible driver, which a serving image may lack."""
    # float32, whatever the default: models are loaded under one of 16 bits.
    similarity = torch.eye(3, dtype=torch.float32, device="cuda")[None]
    quality = torch.ones(1, 3, dtype=torch.float32, device="cuda")
    try:
        picks = greedy_map_triton(similarity, quality, 2, smallest_block=block)
        agrees = picks.equal(greedy_map_torch(similarity, quality, 2))
    # Whatever Triton, its C compiler or the driver raises: the torch implementation works.
    except Exception as error:  # noqa: BLE001
        logger.warning(
            "Of up to %d tokens, selection runs in torch, not in Triton: %s",
            block,
            error,
        )
        return False
    return agrees
