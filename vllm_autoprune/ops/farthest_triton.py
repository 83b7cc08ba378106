"""Farthest-point sampling as a Triton kernel: all picks of all images of a batch in one launch.

One program per image (or tile) reads one row of the distances per pick, and keeps the distance of
each token to the nearest pick in global memory, where it stays cached. In torch a pick is some six
launches of 5 to 8 µs each. Nothing that a walk needs is prepared by launches of its own.

Tested against the torch implementation on CPU tensors with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_autoprune.ops.farthest_torch import Chosen, Walk, Weighting, walk_torch
from vllm_autoprune.ops.greedy import HUGE
from vllm_autoprune.ops.kernels import agrees, block_for, warps_for
from vllm_autoprune.ops.rowwise import TIE


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _copy_nearest(
    nearest: tl.tensor,
    taken: tl.tensor,
    near: tl.tensor,
    tokens: tl.tensor,
    block: tl.constexpr,
) -> tl.tensor:
    """Write ``near``, with NaN as infinity and taken tokens as minus infinity.

    Returns whether no token is chosen.
    """
    lane = tl.arange(0, block)
    highest = float("inf")
    finite = tl.full((block,), 0, tl.int32)
    for start in range(0, tokens, block):
        token = start + lane
        inside = token < tokens
        known = tl.load(nearest + token, mask=inside, other=highest).to(tl.float32)
        known = tl.where(known == known, known, highest)
        finite = tl.maximum(finite, (known < highest).to(tl.int32))
        closed = tl.load(taken + token, mask=inside, other=0) != 0
        tl.store(near + token, tl.where(closed, -highest, known), mask=inside)
    return tl.max(finite, axis=0) == 0


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _score(
    near: tl.tensor,
    weight: tl.tensor,
    apart: tl.tensor,
    token: tl.tensor,
    inside: tl.tensor,
    at_start: tl.tensor,
    weighted: tl.constexpr,
) -> tl.tensor:
    """Scores ``(block,)``: ``near``, or weighted, or ``apart`` at the first pick (``at_start``)."""
    scores = near
    if weighted:
        weights = tl.load(weight + token, mask=inside, other=0.0).to(tl.float32)
        scores = weights * near
        if at_start:
            scores = tl.load(apart + token, mask=inside, other=0.0).to(tl.float32)
        scores = tl.where(near == -float("inf"), near, scores)
    return scores


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _pick_farthest(  # noqa: PLR0913  # a kernel takes flat arguments: pointers, numbers, constants
    near: tl.tensor,
    weight: tl.tensor,
    apart: tl.tensor,
    tokens: tl.tensor,
    at_start: tl.tensor,
    bound: tl.tensor,
    weighted: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """The lowest token whose score is at least ``bound``."""
    lane = tl.arange(0, block)
    found = tl.full((block,), 0, tl.int32) + tokens
    for start in range(0, tokens, block):
        token = start + lane
        inside = token < tokens
        to_nearest = tl.load(near + token, mask=inside, other=-float("inf"))
        scores = _score(to_nearest, weight, apart, token, inside, at_start, weighted)
        found = tl.minimum(found, tl.where(scores >= bound, token, tokens))
    return tl.min(found, axis=0)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _pick_heaviest(
    near: tl.tensor,
    fill: tl.tensor,
    tokens: tl.tensor,
    huge: tl.tensor,
    block: tl.constexpr,
) -> tl.tensor:
    """The lowest token of largest ``fill`` among those whose ``near`` is not minus infinity."""
    lane = tl.arange(0, block)
    largest = tl.full((block,), -float("inf"), tl.float32)
    heaviest = tl.full((block,), 0, tl.int32) + tokens
    for start in range(0, tokens, block):
        token = start + lane
        inside = token < tokens
        key = tl.load(fill + token, mask=inside, other=0.0).to(tl.float32)
        # NaN (key != key) comes first, as in fill_by_weight.
        key = tl.where(key == key, tl.minimum(tl.maximum(key, -huge), huge), huge)
        distance = tl.load(near + token, mask=inside, other=-float("inf"))
        key = tl.where(distance == -float("inf"), distance, key)
        heaviest = tl.where(key > largest, token, heaviest)
        largest = tl.maximum(largest, key)
    best = tl.max(largest, axis=0)
    return tl.min(tl.where(largest == best, heaviest, tokens), axis=0)


# Integers and alignments differ between images, so no variant is compiled for them.
@triton.jit(  # type: ignore[untyped-decorator]  # Triton has no types
    do_not_specialize=("tokens", "count"),
    do_not_specialize_on_alignment=(
        "distance",
        "nearest",
        "taken",
        "near",
        "weight",
        "apart",
        "fill",
        "leading",
    ),
)
def _farthest(  # noqa: PLR0913  # a kernel takes flat arguments: pointers, numbers, constants
    distance: tl.tensor,
    nearest: tl.tensor,
    taken: tl.tensor,
    near: tl.tensor,
    weight: tl.tensor,
    apart: tl.tensor,
    fill: tl.tensor,
    leading: tl.tensor,
    picks: tl.tensor,
    tokens: tl.tensor,
    count: tl.tensor,
    floor: tl.tensor,
    huge: tl.tensor,
    tie: tl.tensor,
    weighted: tl.constexpr,
    led: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Write the picks of image ``program_id(0)``, as ``farthest_torch.Walk`` says.

    A NaN score ends the picks by score, as one of at most ``floor`` does. At the first pick of an
    image without chosen tokens, where ``floor`` does not apply, it picks token 0. Both are as in
    torch.

    Pointers: distance ``(B, N, N)`` and nearest ``(B, N)`` of one floating dtype; taken ``(B, N)``
    bool; weight, apart, fill and the scratch memory near ``(B, N)`` float32; leading and picks
    ``(B, count)`` int64. Numbers and constants:

    tokens: N.
    count: picks of an image.
    floor: once the largest score is at most ``floor + tie``, picks are by ``fill``.
    huge: fill that stands for an infinite or NaN one.
    tie: difference within which scores count as equal.
    weighted: scores are weighted. If false, ``weight``, ``apart`` and ``fill`` are not read.
    led: entries of ``leading`` other than -1 are forced picks. If false, ``leading`` is not read.
    block: power of two; tokens that a program reads at once.
    """
    image = tl.program_id(0).to(tl.int64)
    distance += image * tokens * tokens
    nearest += image * tokens
    taken += image * tokens
    near += image * tokens
    weight += image * tokens
    apart += image * tokens
    fill += image * tokens
    picks += image * count
    leading += image * count

    lane = tl.arange(0, block)
    lowest = -float("inf")
    begins = _copy_nearest(nearest, taken, near, tokens, block)
    tl.debug_barrier()

    scores_decide = True
    pick = tl.full((), 0, tl.int32)
    for step in range(count):
        at_start = begins & (step == 0)
        # tl.max ignores NaN. In torch a single NaN makes the bound NaN and picks token 0.
        largest = tl.full((block,), lowest, tl.float32)
        broken = tl.full((block,), 0, tl.int32)
        for start in range(0, tokens, block):
            token = start + lane
            inside = token < tokens
            to_nearest = tl.load(near + token, mask=inside, other=lowest)
            if step > 0:
                offset = pick.to(tl.int64) * tokens
                row = tl.load(distance + offset + token, mask=inside, other=0.0)
                # A token at minus infinity is taken, and stays so. tl.minimum ignores NaN.
                to_nearest = tl.minimum(to_nearest, row.to(tl.float32))
                to_nearest = tl.where(token == pick, lowest, to_nearest)
                tl.store(near + token, to_nearest, mask=inside)
            scores = _score(
                to_nearest, weight, apart, token, inside, at_start, weighted
            )
            broken = tl.maximum(broken, (scores != scores).to(tl.int32))
            largest = tl.maximum(largest, scores)
        best = tl.max(largest, axis=0)
        is_broken = tl.max(broken, axis=0) > 0
        # As in torch, the bound is rounded to the dtype of the distances.
        bound = (best - tie).to(distance.dtype.element_ty).to(tl.float32)
        forced = tl.full((), -1, tl.int32)
        if led:
            forced = tl.load(leading + step).to(tl.int32)
        if weighted:
            exceeds = (bound > floor) & (is_broken == 0)
            scores_decide = scores_decide & (exceeds | at_start | (forced >= 0))
        tl.debug_barrier()
        if scores_decide:
            pick = _pick_farthest(
                near, weight, apart, tokens, at_start, bound, weighted, block
            )
            pick = tl.where(is_broken, 0, pick)
        else:
            pick = _pick_heaviest(near, fill, tokens, huge, block)
        pick = tl.where(forced >= 0, forced, pick)
        tl.store(picks + step, pick.to(tl.int64))


def walk_triton(walk: Walk, *, block: int | None = None) -> Tensor:
    """Triton implementation of :func:`vllm_autoprune.ops.farthest_torch.walk_torch`.

    ``block`` is by default that of N.
    """
    distance = walk.distance
    batch, tokens = walk.chosen.nearest.shape
    picks = torch.empty(batch, walk.count, dtype=torch.int64, device=distance.device)
    if batch == 0 or walk.count == 0:
        return picks
    block = block or block_for(tokens)
    near = torch.empty(batch, tokens, dtype=torch.float32, device=distance.device)
    weighting = walk.weighting or Weighting(near, near, near, 0.0)  # not read if None
    _farthest[(batch,)](
        distance.contiguous(),
        walk.chosen.nearest.to(distance.dtype).contiguous(),
        walk.chosen.taken.contiguous(),
        near,
        weighting.weight.contiguous(),
        weighting.apart.contiguous(),
        weighting.fill.contiguous(),
        picks if walk.leading is None else walk.leading.contiguous(),  # as weighting
        picks,
        tokens,
        walk.count,
        weighting.floor,
        HUGE,
        TIE,
        weighted=walk.weighting is not None,
        led=walk.leading is not None,
        block=block,
        num_warps=warps_for(block),
    )
    return picks


def works(tokens: int = 1) -> bool:
    """Whether the kernel compiles and runs on this machine's GPU for N tokens.

    Each block size is tested once, and its failure is logged once.
    """
    return _block_works(block_for(tokens))


@functools.cache
def _block_works(block: int) -> bool:
    """Whether a kernel of this block size compiles, runs and agrees with torch on a GPU."""
    return agrees(
        functools.partial(_try_block, block),
        f"Farthest-point sampling of up to {block} tokens",
    )


def _try_block(block: int) -> bool:
    """Compile and run the kernel in all its forms, and compare its picks with torch's."""
    nothing = torch.zeros(1, 3, dtype=torch.bool, device="cuda")
    walks = []
    # The dtypes of features, and explicitly: vLLM sets another default while it loads a model.
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        distance = 1 - torch.eye(3, dtype=dtype, device="cuda")[None]
        nearest = torch.ones(1, 3, dtype=dtype, device="cuda")
        walks.append(Walk(distance, Chosen(nearest, nothing), 2))
    distance = walks[0].distance
    chosen = walks[0].chosen
    weighting = Weighting(chosen.nearest, chosen.nearest, chosen.nearest, 0.0)
    for leading in (None, torch.full((1, 2), -1, device="cuda")):
        walks.append(Walk(distance, chosen, 2, weighting, leading))
    picks = [walk_triton(walk, block=block) for walk in walks]
    return all(map(torch.equal, picks, map(walk_torch, walks)))
