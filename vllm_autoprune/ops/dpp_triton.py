"""Greedy MAP as a Triton kernel: all K steps of all images of a batch in a single launch.

One program per image (or tile) keeps the residuals of all tokens in registers and the Cholesky
factors in global memory, where they stay cached: 147 kB at N = 576 and K = 64. The published loop
launches about ten kernels per step, so that launch latency dominates.

The kernel is compiled once for each block size, which is a power of two, and for nothing else that
differs between images, because compiling takes 0.5 to 3 s.

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
"""Tokens of the smallest block: one per thread of four warps, the least that a program has."""

_ALIGNED = tl.constexpr(ALIGNED)


# By default Triton compiles another variant for an integer that is 1 or divisible by 16, and for
# a tensor whose address is aligned. Both differ between images, so neither is specialised on.
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
    """Write the greedy MAP picks of image ``program_id(0)`` to its row of ``picks``.

    Pointers: similarity ``(B, N, N)``; quality, eligible and residuals ``(B, N)``; anchors
    ``(B, forced)``; factors ``(B, fixed + count, width)``, where ``width`` is N rounded up to a
    multiple of ``_ALIGNED``; picks ``(B, count)``. Numbers, the constants of
    :mod:`vllm_autoprune.ops.greedy` among them:

    tokens: N.
    count: picks of an image, the forced ones included.
    forced: leading picks that are read from ``anchors``, not chosen.
    fixed: leading rows of ``factors`` that conditioning has already filled.
    exhausted: gain at or below which the rank of the kernel counts as exhausted.
    divisor: lower bound of a pivot.
    huge: quality that stands for an infinite or NaN one.
    unit: difference from 1 within which a diagonal entry counts as a rounded 1.
    tie: relative width of a tie between gains.
    block: power of two of at least N; tokens that a program holds in registers.
    rows: earlier rows of ``factors`` that are read at once.
    """
    image = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, block)  # indices of all tokens
    inside = token < tokens
    # Rows of factors are padded, so that the compiler knows that they are aligned and reads four
    # numbers at once. Padding is stored as zeros and never picked.
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
    # Order of the picks that gains do not decide. NaN (q != q) comes first.
    by_weight = tl.where(q == q, tl.minimum(tl.maximum(q, -huge), huge), huge)
    gains_decide = True

    for step in range(count):
        # The residual is the diagonal itself only at the very first pick, without conditioning.
        rounded_one = (fixed + step == 0) & (tl.abs(residual - 1.0) <= unit)
        gain = weight * tl.where(free, tl.where(rounded_one, 1.0, residual), -1.0)
        # A NaN gain has to win the maximum, as in torch, but tl.max ignores NaN. So NaN becomes
        # infinity, and an infinite gain becomes LARGEST: from here on infinity means NaN.
        gain = tl.where(gain == gain, tl.minimum(gain, LARGEST), float("inf"))
        best = tl.max(gain, axis=0)
        # The lowest index wins among gains that are within a rounding of the best. If the best is
        # negative, best * (1 - tie) exceeds it, and the minimum falls back on the best itself.
        near = gain >= tl.minimum(best, best * (1.0 - tie))
        pick = tl.min(tl.where(near, token, block), axis=0)
        if step < forced:
            pick = tl.load(anchors + step).to(tl.int32)
        else:
            # From the first exhausted or NaN gain on, all picks are by descending weight.
            gains_decide = gains_decide & (best > exhausted) & (best < float("inf"))
            if not gains_decide:
                pick = tl.argmax(tl.where(free, by_weight, -float("inf")), axis=0)
        tl.store(picks + step, pick.to(tl.int64))
        free = free & (token != pick)

        # Incremental Cholesky factorisation (Chen et al. 2018, algorithm 1). With pick p at row k:
        # F_k = (S_p - sum_{i < k} F_i[p] F_i) / sqrt(residual_p), and residual -= F_k^2.
        row = tl.load(similarity + pick * tokens + token, mask=inside, other=0.0)
        for start in range(0, fixed + step, rows):
            earlier = start + tl.arange(0, rows)
            filled = earlier < fixed + step
            pick_factors = tl.load(
                factors + earlier * width + pick, mask=filled, other=0.0
            )
            earlier_rows = tl.load(
                factors + earlier[:, None] * width + token[None, :],
                mask=filled[:, None] & stored[None, :],
                other=0.0,
            )
            row -= tl.sum(pick_factors[:, None] * earlier_rows, axis=0)
        # This is residual[pick], written as a sum because registers cannot be indexed.
        pivot = tl.sum(tl.where(token == pick, residual, 0.0), axis=0)
        pivot = tl.maximum(pivot, divisor, propagate_nan=tl.PropagateNan.ALL)
        row = row / tl.sqrt(pivot)
        residual -= row * row
        tl.store(factors + (fixed + step) * width + token, row, mask=stored)
        # The next step reads factors that other threads have stored.
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

    ``smallest_block`` is the lower bound of the block size: a power of two of at least 128.
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
    """Block size, factor rows that are read at once, and warps of a program, for N tokens."""
    block = max(_SMALLEST_BLOCK, int(triton.next_power_of_2(tokens)))
    return block, max(1, min(16, _TILE // block)), min(16, max(4, block // 128))


def works(tokens: int = 1) -> bool:
    """Whether the kernel compiles and runs on this machine's GPU for N tokens.

    Each block size is tested once, and its failure is logged once.
    """
    block, _, _ = _launch_options(tokens)
    return _block_works(block)


@functools.cache
def _block_works(block: int) -> bool:
    """Whether a kernel of this block size compiles, runs and agrees with torch on a GPU.

    Triton needs a C compiler and a compatible driver, which a serving image may lack.
    """
    # float32 explicitly: vLLM sets a 16-bit default dtype while it loads a model.
    similarity = torch.eye(3, dtype=torch.float32, device="cuda")[None]
    quality = torch.ones(1, 3, dtype=torch.float32, device="cuda")
    try:
        picks = greedy_map_triton(similarity, quality, 2, smallest_block=block)
        agrees = picks.equal(greedy_map_torch(similarity, quality, 2))
    # Whatever Triton, its C compiler or the driver raises, the torch implementation still works.
    except Exception as error:  # noqa: BLE001
        logger.warning(
            "Of up to %d tokens, selection runs in torch, not in Triton: %s",
            block,
            error,
        )
        return False
    return agrees
