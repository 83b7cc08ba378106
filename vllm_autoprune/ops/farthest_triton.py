"""Farthest-point sampling as a Triton kernel: all picks of all images of a batch in one launch.

One program per image (or tile) reads one row of the distances per pick, and keeps the distance of
each token to the nearest pick in global memory, where it stays cached. In torch a pick is some six
launches of 5 to 8 µs each.

Tested against the torch implementation on CPU tensors with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_autoprune.ops.farthest_torch import walk_torch
from vllm_autoprune.ops.kernels import agrees
from vllm_autoprune.ops.rowwise import TIE

_SMALLEST_BLOCK = 128
"""Tokens of the smallest block: one per thread of four warps, the least that a program has."""

_LARGEST_BLOCK = 4096
"""Tokens of the largest block: eight per thread of sixteen warps."""


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _score(
    near: tl.tensor,
    first_scores: tl.tensor,
    weight: tl.tensor,
    token: tl.tensor,
    inside: tl.tensor,
    step: tl.tensor,
    weighted: tl.constexpr,
) -> tl.tensor:
    """Scores ``(block,)``: ``first_scores`` at the first pick, then ``near``, weighted or not."""
    lowest = -float("inf")
    if step == 0:
        scores = tl.load(first_scores + token, mask=inside, other=lowest).to(tl.float32)
    elif weighted:
        weights = tl.load(weight + token, mask=inside, other=0.0).to(tl.float32)
        scores = tl.where(near == lowest, lowest, weights * near)
    else:
        scores = near
    return scores


# Integers and alignments differ between images, so no variant is compiled for them.
@triton.jit(  # type: ignore[untyped-decorator]  # Triton has no types
    do_not_specialize=("tokens", "count"),
    do_not_specialize_on_alignment=(
        "distance",
        "nearest",
        "first_scores",
        "weight",
        "leading",
    ),
)
def _farthest(  # noqa: PLR0913  # a kernel takes flat arguments: pointers, numbers, constants
    distance: tl.tensor,
    nearest: tl.tensor,
    first_scores: tl.tensor,
    weight: tl.tensor,
    leading: tl.tensor,
    picks: tl.tensor,
    bounds: tl.tensor,
    tokens: tl.tensor,
    count: tl.tensor,
    tie: tl.tensor,
    weighted: tl.constexpr,
    led: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Write the picks of image ``program_id(0)``, as ``farthest_torch.Walk`` says.

    A NaN score makes the bound NaN and picks token 0, as in torch.

    Pointers: distance ``(B, N, N)`` of any floating dtype; nearest, which is overwritten, and
    first_scores ``(B, N)`` float32; weight ``(B, N)`` of any floating dtype; leading and picks
    ``(B, count)`` int64; bounds ``(B, count)`` float32. Numbers and constants:

    tokens: N.
    count: picks of an image.
    tie: difference within which scores count as equal.
    weighted: scores are ``nearest`` times ``weight``. If false, ``weight`` is not read.
    led: entries of ``leading`` from 0 on are forced picks. If false, ``leading`` is not read.
    block: power of two; tokens that a program reads at once.
    """
    image = tl.program_id(0).to(tl.int64)
    distance += image * tokens * tokens
    nearest += image * tokens
    first_scores += image * tokens
    weight += image * tokens
    picks += image * count
    bounds += image * count
    leading += image * count

    lane = tl.arange(0, block)
    lowest = -float("inf")
    highest = float("inf")
    pick = tl.full((), 0, tl.int32)
    for step in range(count):
        # tl.max ignores NaN, of which one makes the bound NaN and picks token 0 in torch.
        largest = tl.full((block,), lowest, tl.float32)
        for start in range(0, tokens, block):
            token = start + lane
            inside = token < tokens
            near = tl.load(nearest + token, mask=inside, other=lowest)
            if step > 0:
                offset = pick.to(tl.int64) * tokens
                row = tl.load(distance + offset + token, mask=inside, other=0.0)
                # A token at minus infinity is taken, and stays so. tl.minimum ignores NaN.
                near = tl.minimum(near, row.to(tl.float32))
                near = tl.where(token == pick, lowest, near)
                tl.store(nearest + token, near, mask=inside)
            scores = _score(near, first_scores, weight, token, inside, step, weighted)
            scores = tl.where(scores == scores, scores, highest)
            largest = tl.maximum(largest, scores)
        best = tl.max(largest, axis=0)
        # As in torch, the bound is rounded to the dtype of the distances.
        bound = (best - tie).to(distance.dtype.element_ty).to(tl.float32)
        tl.debug_barrier()
        found = tl.full((block,), tokens, tl.int32)
        broken = tl.full((block,), 0, tl.int32)
        for start in range(0, tokens, block):
            token = start + lane
            inside = token < tokens
            near = tl.load(nearest + token, mask=inside, other=lowest)
            scores = _score(near, first_scores, weight, token, inside, step, weighted)
            found = tl.minimum(found, tl.where(scores >= bound, token, tokens))
            broken = tl.maximum(broken, (scores != scores).to(tl.int32))
        pick = tl.min(found, axis=0)
        is_broken = tl.max(broken, axis=0) > 0
        pick = tl.where(is_broken, 0, pick)
        bound = tl.where(is_broken, float("nan"), bound)
        if led:
            forced = tl.load(leading + step).to(tl.int32)
            pick = tl.where(forced >= 0, forced, pick)
        tl.store(picks + step, pick.to(tl.int64))
        tl.store(bounds + step, bound)


def walk_triton(
    distance: Tensor,
    nearest: Tensor,
    first_scores: Tensor,
    count: int,
    weight: Tensor | None = None,
    leading: Tensor | None = None,
    *,
    block: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Triton implementation of :class:`vllm_autoprune.ops.farthest_torch.Walk`.

    ``block`` is by default that of N: a power of two of at least 128.
    """
    batch, tokens = nearest.shape
    picks = torch.empty(batch, count, dtype=torch.int64, device=nearest.device)
    bounds = torch.empty(batch, count, dtype=torch.float32, device=nearest.device)
    if batch == 0 or count == 0:
        return picks, bounds
    block = block or _block(tokens)
    first_scores = first_scores.to(torch.float32).contiguous()
    nearest = nearest.to(torch.float32, copy=True).contiguous()
    _farthest[(batch,)](
        distance.contiguous(),
        nearest,
        first_scores,
        first_scores if weight is None else weight.contiguous(),  # not read if None
        picks if leading is None else leading.contiguous(),  # not read if None
        picks,
        bounds,
        tokens,
        count,
        TIE,
        weighted=weight is not None,
        led=leading is not None,
        block=block,
        num_warps=min(16, max(4, block // 128)),
    )
    return picks, bounds


def _block(tokens: int) -> int:
    """Block size for N tokens."""
    power = int(triton.next_power_of_2(tokens))
    return min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, power))


def works(tokens: int = 1) -> bool:
    """Whether the kernel compiles and runs on this machine's GPU for N tokens.

    Each block size is tested once, and its failure is logged once.
    """
    return _block_works(_block(tokens))


@functools.cache
def _block_works(block: int) -> bool:
    """Whether a kernel of this block size compiles, runs and agrees with torch on a GPU."""
    return agrees(
        functools.partial(_try_block, block),
        f"Farthest-point sampling of up to {block} tokens",
    )


def _try_block(block: int) -> bool:
    """Compile and run the kernel in all its forms, and compare its picks with torch's."""
    equal = True
    # The dtypes of features, and explicitly: vLLM sets another default while it loads a model.
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        distance = 1 - torch.eye(3, dtype=dtype, device="cuda")[None]
        nearest = torch.ones(1, 3, dtype=dtype, device="cuda")
        picks, _ = walk_triton(distance, nearest, nearest, 2, block=block)
        equal &= picks.equal(walk_torch(distance, nearest, nearest, 2)[0])
    distance = 1 - torch.eye(3, dtype=torch.float32, device="cuda")[None]
    nearest = torch.ones(1, 3, dtype=torch.float32, device="cuda")
    for leading in (None, torch.full((1, 2), -1, device="cuda")):
        weighted = (distance, nearest, nearest, 2, nearest, leading)
        picks, _ = walk_triton(*weighted, block=block)
        equal &= picks.equal(walk_torch(*weighted)[0])
    return equal
