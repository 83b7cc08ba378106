"""Greedy MAP as a Triton kernel: all K steps of all images of a batch in a single launch.

A program keeps the residuals of its tokens in registers and their Cholesky factors in global
memory. The published loop launches about ten kernels per step, so that launch latency dominates.

An image of little work has one program: its factors stay cached, 147 kB at N = 576 and K = 64. All
steps together read 2 K^2 N bytes of factors, 2 GB at N = 4,096 and K = 512, and one multiprocessor
reads some 100 GB/s. So an image of much work is shared: each program has a slice of the tokens, and
twice per step the programs exchange a number and wait for each other. They have to run at the same
time, which a cooperative launch guarantees.

::

    step            program 0 (tokens 0..127)   program 1 (128..255)   ...
    largest gain    of the slice                of the slice
    exchange ------------------------------------------------------------> largest of all
    nearest to it   lowest index, residual      lowest index, residual
    exchange ------------------------------------------------------------> pick, its residual
    update          factors and residuals       factors and residuals

The kernel is compiled once for each block size, which is a power of two, and for nothing else that
differs between images, because compiling takes 0.5 to 3 s. Whether an image is shared depends on N
and K alone: its picks are the same alone and in a batch.

Tested against the torch implementation on CPU tensors with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

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
from vllm_autoprune.ops.kernels import agrees
from vllm_autoprune.ops.rowwise import ALIGNED, TIE

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_TILE = 16384
"""Factors that a program reads at once: 32 or 64 registers per thread."""

_SMALLEST_BLOCK = 128
"""Tokens of the smallest block: one per thread of four warps, the least that a program has."""

_LARGEST_BLOCK = 4096
"""Tokens of the largest image that one program works on: registers hold all of them."""

_SHARED_FROM = 2**18
"""N K above which an image is shared. One program reads 2 K^2 N bytes at 100 GB/s, and exchanging
takes some 5 µs per step, so both take as long at N K = 250,000."""

_MOST_PROGRAMS = tl.constexpr(128)
"""Programs that share an image: at most one for each multiprocessor of a large GPU."""

_ALIGNED = tl.constexpr(ALIGNED)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _exchange(
    value: tl.tensor,
    companion: tl.tensor,
    slots: tl.tensor,
    arrivals: tl.tensor,
    meeting: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Values and companions of all programs of an image, ``(_MOST_PROGRAMS,)`` each.

    Programs wait for each other, as in torch inductor's ``x_grid_barrier``. slots ``(2, 2,
    programs)``: even and odd meetings use different ones, because a program may still read those of
    the last meeting. arrivals counts arrivals at all meetings up to the present one, ``meeting``.
    """
    slots += (meeting % 2) * 2 * programs
    tl.store(slots + program, value)
    tl.store(slots + programs + program, companion)
    tl.debug_barrier()  # all threads have stored, also the factors of the last step
    arrived = tl.atomic_add(arrivals, 1, sem="acq_rel") + 1
    while arrived < (meeting + 1) * programs:
        arrived = tl.atomic_add(arrivals, 0, sem="acquire")
    tl.debug_barrier()
    other = tl.arange(0, _MOST_PROGRAMS)
    present = other < programs
    # Not from the cache of this multiprocessor, which other ones do not write to.
    values = tl.load(slots + other, mask=present, other=0.0, cache_modifier=".cg")
    companions = tl.load(
        slots + programs + other, mask=present, other=0.0, cache_modifier=".cg"
    )
    return values, companions


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _pick_lowest(  # noqa: PLR0913  # a kernel takes flat arguments: pointers, numbers, constants
    value: tl.tensor,
    residual: tl.tensor,
    tie: tl.tensor,
    token: tl.tensor,
    slots: tl.tensor,
    arrivals: tl.tensor,
    meeting: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    shared: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The lowest token whose value is within ``tie`` of the maximum, its residual, the maximum.

    Over all programs of the image. Two meetings if it is shared.
    """
    best = tl.max(value, axis=0)
    if shared:
        bests, _ = _exchange(best, best, slots, arrivals, meeting, program, programs)
        other = tl.arange(0, _MOST_PROGRAMS)
        best = tl.max(tl.where(other < programs, bests, -float("inf")), axis=0)
    # If the maximum is negative, best * (1 - tie) exceeds it, and the bound is the maximum itself.
    near = value >= tl.minimum(best, best * (1.0 - tie))
    none = 2147483647
    pick = tl.min(tl.where(near, token, none), axis=0)
    # This is residual[pick], written as a sum because registers cannot be indexed.
    pivot = tl.sum(tl.where(token == pick, residual, 0.0), axis=0)
    if shared:
        # As numbers of the same bits, so that a pick and its residual are exchanged alike.
        picks, pivots = _exchange(
            pick.to(tl.float32, bitcast=True),
            pivot,
            slots,
            arrivals,
            meeting + 1,
            program,
            programs,
        )
        other = tl.arange(0, _MOST_PROGRAMS)
        candidates = picks.to(tl.int32, bitcast=True)
        candidates = tl.where(other < programs, candidates, none)
        pick = tl.min(candidates, axis=0)
        pivot = tl.sum(tl.where(candidates == pick, pivots, 0.0), axis=0)
    return pick, pivot, best


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _project(  # noqa: PLR0913  # a kernel takes flat arguments: pointers, numbers, constants
    row: tl.tensor,
    factors: tl.tensor,
    pick: tl.tensor,
    token: tl.tensor,
    stored: tl.tensor,
    filled: tl.tensor,
    width: tl.tensor,
    rows: tl.constexpr,
) -> tl.tensor:
    """``row`` minus its projection on the ``filled`` rows of ``factors``, ``rows`` at a time."""
    for start in range(0, filled, rows):
        earlier = start + tl.arange(0, rows)
        present = earlier < filled
        pick_factors = tl.load(
            factors + earlier * width + pick, mask=present, other=0.0
        )
        earlier_rows = tl.load(
            factors + earlier[:, None] * width + token[None, :],
            mask=present[:, None] & stored[None, :],
            other=0.0,
        )
        row -= tl.sum(pick_factors[:, None] * earlier_rows, axis=0)
    return row


# By default Triton compiles another variant for an integer that is 1 or divisible by 16, and for
# a tensor whose address is aligned. Both differ between images, so neither is specialised on.
@triton.jit(  # type: ignore[untyped-decorator]  # Triton has no types
    do_not_specialize=(
        "residual_image_stride",
        "residual_stride",
        "limited",
        "tokens",
        "programs",
        "count",
        "forced",
        "fixed",
    ),
    do_not_specialize_on_alignment=(
        "similarity",
        "quality",
        "eligible",
        "anchors",
        "residuals",
    ),
)
def _greedy_map(  # noqa: PLR0913, PLR0915  # a kernel takes flat arguments, and is one function
    similarity: tl.tensor,
    quality: tl.tensor,
    eligible: tl.tensor,
    anchors: tl.tensor,
    residuals: tl.tensor,
    factors: tl.tensor,
    picks: tl.tensor,
    slots: tl.tensor,
    arrivals: tl.tensor,
    residual_image_stride: tl.tensor,
    residual_stride: tl.tensor,
    limited: tl.tensor,
    tokens: tl.tensor,
    programs: tl.tensor,
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
    shared: tl.constexpr,
) -> None:
    """Write the greedy MAP picks of image ``program_id(0) // programs`` to its row of ``picks``.

    Pointers: similarity ``(B, N, N)``; quality, eligible and residuals ``(B, N)``; anchors
    ``(B, forced)``; factors ``(B, fixed + count, width)``, where ``width`` is N rounded up to a
    multiple of ``_ALIGNED``; picks ``(B, count)``; of a shared image slots ``(B, 4, programs)`` and
    arrivals ``(B,)`` int32, zeros, for :func:`_exchange`. Numbers, the constants of
    :mod:`vllm_autoprune.ops.greedy` among them:

    residual_image_stride, residual_stride: strides of ``residuals``, which may be a diagonal.
    limited: 1, or 0 if all tokens are eligible: then ``eligible`` is not read.
    tokens: N.
    programs: programs of an image.
    count: picks of an image, the forced ones included.
    forced: leading picks that are read from ``anchors``, not chosen.
    fixed: leading rows of ``factors`` that conditioning has already filled.
    exhausted: gain at or below which the rank of the kernel counts as exhausted.
    divisor: lower bound of a pivot.
    huge: quality that stands for an infinite or NaN one.
    unit: difference from 1 within which a diagonal entry counts as a rounded 1.
    tie: relative width of a tie between gains.
    block: tokens that a program holds in registers; a power of two. The programs of an image
        together hold at least N.
    rows: earlier rows of ``factors`` that are read at once.
    shared: the image has several programs.
    """
    image = (tl.program_id(0) // programs).to(tl.int64)
    program = tl.program_id(0) % programs
    token = program * block + tl.arange(0, block)  # indices of the program's tokens
    inside = token < tokens
    # Rows of factors are padded, so that the compiler knows that they are aligned and reads four
    # numbers at once. Padding is stored as zeros and never picked.
    width = tl.cdiv(tokens, _ALIGNED) * _ALIGNED
    stored = token < width
    similarity += image * tokens * tokens
    factors += image * (fixed + count) * width
    picks += image * count
    anchors += image * forced
    slots += image * 4 * programs
    arrivals += image
    meeting = 0  # number of meetings of the image's programs so far

    q = tl.load(quality + image * tokens + token, mask=inside, other=0.0)
    residuals += image * residual_image_stride
    residual = tl.load(residuals + token * residual_stride, mask=inside, other=0.0)
    limits = token < tokens * limited
    free = tl.load(eligible + image * tokens + token, mask=limits, other=1) != 0
    free = free & inside
    weight = q * q
    # Order of the picks that gains do not decide. NaN (q != q) comes first.
    by_quality = tl.where(q == q, tl.minimum(tl.maximum(q, -huge), huge), huge)
    gains_decide = tl.full((), 1, tl.int1)

    for step in range(count):
        # The residual is the diagonal itself only at the very first pick, without conditioning.
        rounded_one = (fixed + step == 0) & (tl.abs(residual - 1.0) <= unit)
        gain = weight * tl.where(free, tl.where(rounded_one, 1.0, residual), -1.0)
        # A NaN gain has to win the maximum, as in torch, but tl.max ignores NaN. So NaN becomes
        # infinity, and an infinite gain becomes LARGEST: from here on infinity means NaN.
        gain = tl.where(gain == gain, tl.minimum(gain, LARGEST), float("inf"))
        if step < forced:
            pick = tl.load(anchors + step).to(tl.int32)
            pivot = tl.sum(tl.where(token == pick, residual, 0.0), axis=0)
            if shared:
                _, pivots = _exchange(
                    pivot, pivot, slots, arrivals, meeting, program, programs
                )
                meeting += 1
                # All others have exchanged zero.
                pivot = tl.sum(pivots, axis=0)
        else:
            # From the first exhausted or NaN gain on, all picks are by descending quality. The
            # token of such a gain is not picked: the step picks again.
            again = tl.full((), 1, tl.int1)
            pick = tl.full((), 0, tl.int32)
            pivot = tl.full((), 0.0, tl.float32)
            while again:
                by_order = tl.where(free, by_quality, -float("inf"))
                value = tl.where(gains_decide, gain, by_order)
                pick, pivot, best = _pick_lowest(
                    value,
                    residual,
                    tl.where(gains_decide, tie, 0.0),
                    token,
                    slots,
                    arrivals,
                    meeting,
                    program,
                    programs,
                    shared,
                )
                meeting += 2
                again = gains_decide & ((best <= exhausted) | (best == float("inf")))
                gains_decide = gains_decide & (again == 0)
        if program == 0:
            tl.store(picks + step, pick.to(tl.int64))
        free = free & (token != pick)

        # Incremental Cholesky factorisation (Chen et al. 2018, algorithm 1). With pick p at row k:
        # F_k = (S_p - sum_{i < k} F_i[p] F_i) / sqrt(residual_p), and residual -= F_k^2.
        row = tl.load(similarity + pick * tokens + token, mask=inside, other=0.0)
        row = _project(row, factors, pick, token, stored, fixed + step, width, rows)
        pivot = tl.maximum(pivot, divisor, propagate_nan=tl.PropagateNan.ALL)
        row = row / tl.sqrt(pivot)
        residual -= row * row
        tl.store(factors + (fixed + step) * width + token, row, mask=stored)
        # The next step reads factors that other threads have stored.
        tl.debug_barrier()


@dataclass(frozen=True, slots=True)
class Launch:
    """How the kernel is launched for an image."""

    block: int
    """Tokens of a program: a power of two of at least 128."""
    programs: int = 1
    """Programs of an image, whose blocks together hold at least N tokens."""

    @classmethod
    def of(cls, tokens: int, count: int) -> Launch:
        """The launch for N = ``tokens`` and K = ``count``, which includes conditioned tokens."""
        block = max(_SMALLEST_BLOCK, int(triton.next_power_of_2(tokens)))
        if tokens <= _LARGEST_BLOCK and tokens * count <= _SHARED_FROM:
            return cls(block)
        block = max(_SMALLEST_BLOCK, block // int(_MOST_PROGRAMS))
        return cls(block, -(-tokens // block))

    @property
    def shared(self) -> bool:
        """Whether an image has several programs."""
        return self.programs > 1

    @property
    def rows(self) -> int:
        """Factor rows that are read at once."""
        return max(1, min(16, _TILE // self.block)) if not self.shared else 64

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return 8 if self.shared else min(16, max(4, self.block // 128))


def greedy_map_triton(
    similarity: Tensor,
    quality: Tensor,
    count: int,
    anchors: Tensor | None = None,
    eligible: Tensor | None = None,
    conditioned: Conditioned | None = None,
    *,
    launch: Launch | None = None,
) -> Tensor:
    """Triton implementation of :func:`vllm_autoprune.ops.dpp.greedy_map`.

    ``launch`` is by default that of N and K.
    """
    batch, tokens = quality.shape
    picks = torch.empty(batch, count, dtype=torch.int64, device=quality.device)
    if batch == 0 or count == 0:
        return picks
    fixed = 0 if conditioned is None else conditioned.factors.shape[1]
    launch = launch or Launch.of(tokens, fixed + count)
    width = -(-tokens // ALIGNED) * ALIGNED
    factors = quality.new_empty(batch, fixed + count, width)
    similarity = similarity.contiguous()
    residual = similarity.diagonal(dim1=1, dim2=2)
    if conditioned is not None:
        residual = conditioned.residual
        factors[:, :fixed, :tokens] = conditioned.factors
        factors[:, :fixed, tokens:] = 0  # padding
    quality = quality.contiguous()
    limited = eligible is not None
    if eligible is None:
        eligible = quality.new_empty(batch, dtype=torch.bool)  # not read
    eligible = eligible.contiguous()
    forced = picks if anchors is None else anchors.contiguous()  # not read if None
    slots = quality.new_empty(batch, 4, launch.programs)
    arrivals = torch.empty(batch, dtype=torch.int32, device=quality.device)
    if launch.shared:
        arrivals.zero_()
    together = _images_together(launch, quality.device) or batch
    for low in range(0, batch, together):
        images = slice(low, low + together)
        _greedy_map[(len(quality[images]) * launch.programs,)](
            similarity[images],
            quality[images],
            eligible[images],
            forced[images],
            residual[images],
            factors[images],
            picks[images],
            slots[images],
            arrivals[images],
            *residual.stride(),
            int(limited),
            tokens,
            launch.programs,
            count,
            0 if anchors is None else anchors.shape[1],
            fixed,
            EXHAUSTED,
            DIVISOR,
            HUGE,
            UNIT,
            TIE,
            block=launch.block,
            rows=launch.rows,
            shared=launch.shared,
            num_warps=launch.warps,
            launch_cooperative_grid=launch.shared,
        )
    return picks


def _images_together(launch: Launch, device: torch.device) -> int:
    """Number of images whose programs can all run at the same time; 0 for any number.

    A multiprocessor always has room for one program.
    """
    if not launch.shared or device.type != "cuda":
        return 0
    return max(1, _multiprocessors(device) // launch.programs)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)


def works(tokens: int = 1, count: int = 1) -> bool:
    """Whether the kernel compiles and runs on this machine's GPU for N and K.

    Each form of it is tested once, and its failure is logged once.
    """
    launch = Launch.of(tokens, count)
    return _launch_works(
        launch if not launch.shared else Launch(launch.block, int(_MOST_PROGRAMS))
    )


@functools.cache
def _launch_works(launch: Launch) -> bool:
    """Whether the kernel compiles, runs and agrees with torch on a GPU in this form."""
    what = f"DPP selection of up to {launch.block * launch.programs} tokens"
    return agrees(functools.partial(_try_launch, launch), what)


def _try_launch(launch: Launch) -> bool:
    # float32 explicitly: vLLM sets a 16-bit default dtype while it loads a model.
    similarity = torch.eye(3, dtype=torch.float32, device="cuda")[None]
    quality = torch.ones(1, 3, dtype=torch.float32, device="cuda")
    picks = greedy_map_triton(similarity, quality, 2, launch=launch)
    return picks.equal(greedy_map_torch(similarity, quality, 2))
