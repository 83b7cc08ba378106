"""Exchanges as a Triton kernel: all of them, of all images of a batch, in one launch.

One program per image. It ends at the first exchange that is not made, which the host would have to
wait for; in torch an exchange is some twenty launches of 5 to 8 µs each.

Tested against the torch implementation on CPU tensors with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_autoprune.ops.exchange_torch import Exchange, exchange_torch
from vllm_autoprune.ops.kernels import agrees, block_for, warps_for
from vllm_autoprune.ops.rowwise import TIE

_LOWEST = tl.constexpr(-float("inf"))


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The larger number of each pair, or NaN, as ``torch.maximum``."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _fill_waiting(
    cosine: tl.tensor,
    nearest: tl.tensor,
    leaving: tl.tensor,
    waiting: tl.tensor,
    tokens: tl.tensor,
    count: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Write the largest cosine to a token that stays or leaves later, of each exchange."""
    lane = tl.arange(0, block)
    for start in range(0, tokens, block):
        token = start + lane
        inside = token < tokens
        largest = tl.load(nearest + token, mask=inside, other=_LOWEST)
        for later in range(count):
            step = count - 1 - later
            tl.store(waiting + step * tokens + token, largest, mask=inside)
            row = cosine + tl.load(leaving + step) * tokens
            largest = _larger(largest, tl.load(row + token, mask=inside, other=_LOWEST))


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _pick_first(
    score: tl.tensor, bound: tl.tensor, tokens: tl.tensor, block: tl.constexpr
) -> tl.tensor:
    """The lowest token whose score is at least ``bound``."""
    lane = tl.arange(0, block)
    lowest = tl.full((block,), 0, tl.int32) + tokens
    for start in range(0, tokens, block):
        token = start + lane
        scores = tl.load(score + token, mask=token < tokens, other=_LOWEST)
        reached = (scores >= bound) & (token < tokens)
        lowest = tl.minimum(lowest, tl.where(reached, token, tokens))
    return tl.min(lowest, axis=0)


# Integers and alignments differ between images, so no variant is compiled for them.
@triton.jit(  # type: ignore[untyped-decorator]  # Triton has no types
    do_not_specialize=("tokens", "count"),
    do_not_specialize_on_alignment=(
        "cosine",
        "nearest",
        "quality",
        "pool",
        "leaving",
        "least",
        "waiting",
        "entered",
        "score",
        "entering",
    ),
)
def _exchange(  # noqa: PLR0913  # a kernel takes flat arguments: pointers, numbers, constants
    cosine: tl.tensor,
    nearest: tl.tensor,
    quality: tl.tensor,
    pool: tl.tensor,
    leaving: tl.tensor,
    least: tl.tensor,
    waiting: tl.tensor,
    entered: tl.tensor,
    score: tl.tensor,
    entering: tl.tensor,
    tokens: tl.tensor,
    count: tl.tensor,
    most_similar: tl.tensor,
    relevance: tl.tensor,
    diversity: tl.tensor,
    tie: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Write the tokens that enter image ``program_id(0)``, as ``exchange_torch.Exchange`` says.

    Pointers: cosine ``(B, N, N)``, nearest and quality ``(B, N)`` and least ``(B, count)`` float32;
    leaving and entering ``(B, count)`` int64, the latter filled with -1; pool ``(B, N)`` bool,
    which loses the tokens that enter; the scratch memories waiting ``(B, count, N)``, score
    ``(B, N)`` and entered ``(B, N)`` float32, the latter filled with minus infinity. Numbers and
    constants:

    tokens: N.
    count: q, the most exchanges of an image.
    most_similar, relevance, diversity: those of ``Exchange``.
    tie: relative difference within which scores count as equal.
    block: power of two; tokens that a program reads at once.
    """
    image = tl.program_id(0).to(tl.int64)
    cosine += image * tokens * tokens
    nearest += image * tokens
    quality += image * tokens
    pool += image * tokens
    leaving += image * count
    least += image * count
    waiting += image * count * tokens
    entered += image * tokens
    score += image * tokens
    entering += image * count

    lane = tl.arange(0, block)
    _fill_waiting(cosine, nearest, leaving, waiting, tokens, count, block)
    tl.debug_barrier()

    step = tl.full((), 0, tl.int32)
    pick = tl.full((), 0, tl.int64)
    active = tl.full((), 1, tl.int1)
    while active & (step < count):
        wanted = tl.load(least + step)
        loser = tl.load(leaving + step)
        largest = tl.full((block,), _LOWEST, tl.float32)
        threshold = tl.full((), 0.0, tl.float32)
        for start in range(0, tokens, block):
            token = start + lane
            inside = token < tokens
            to_entered = tl.load(entered + token, mask=inside, other=_LOWEST)
            if step > 0:
                row = tl.load(
                    cosine + pick * tokens + token, mask=inside, other=_LOWEST
                )
                to_entered = _larger(to_entered, row)
                tl.store(entered + token, to_entered, mask=inside)
            to_waiting = tl.load(
                waiting + step.to(tl.int64) * tokens + token, mask=inside, other=_LOWEST
            )
            similarity = _larger(to_waiting, to_entered)
            worth = tl.load(quality + token, mask=inside, other=_LOWEST)
            scores = relevance * worth - diversity * _larger(similarity, -1.0)
            # A sum over one number, because registers cannot be indexed; NaN stays NaN.
            threshold += tl.sum(tl.where(token == loser, scores, 0.0), axis=0)
            admitted = tl.load(pool + token, mask=inside, other=0) != 0
            admitted = admitted & (similarity <= most_similar) & (worth >= wanted)
            scores = tl.where(admitted & (scores == scores), scores, _LOWEST)
            tl.store(score + token, scores, mask=inside)
            largest = tl.maximum(largest, scores)
        best = tl.max(largest, axis=0)
        tl.debug_barrier()
        # If the maximum is negative, best * (1 - tie) exceeds it, and the bound is the maximum.
        bound = tl.minimum(best, best * (1.0 - tie))
        pick = _pick_first(score, bound, tokens, block).to(tl.int64)
        active = tl.load(score + pick) > threshold
        if active:
            tl.store(entering + step, pick)
            tl.store(pool + pick, 0)
        tl.debug_barrier()
        step += 1


def exchange_triton(call: Exchange, *, block: int | None = None) -> Tensor:
    """Triton implementation of :func:`vllm_autoprune.ops.exchange_torch.exchange_torch`.

    ``block`` is by default that of N.
    """
    batch, count = call.leaving.shape
    tokens = call.quality.shape[1]
    entering = torch.full_like(call.leaving, -1)
    if batch == 0 or count == 0:
        return entering
    block = block or block_for(tokens)
    entered = torch.full_like(call.quality, -torch.inf)
    _exchange[(batch,)](
        call.cosine.contiguous(),
        call.nearest.contiguous(),
        call.quality.contiguous(),
        call.pool.clone(memory_format=torch.contiguous_format),
        call.leaving.contiguous(),
        call.least.contiguous(),
        call.quality.new_empty(batch, count, tokens),
        entered,
        torch.empty_like(entered),
        entering,
        tokens,
        count,
        call.most_similar,
        call.relevance,
        call.diversity,
        TIE,
        block=block,
        num_warps=warps_for(block),
        enable_fp_fusion=False,  # a score is rounded as in torch
    )
    return entering


def works(tokens: int = 1) -> bool:
    """Whether the kernel compiles and runs on this machine's GPU for N tokens.

    Each block size is tested once, and its failure is logged once.
    """
    return _block_works(block_for(tokens))


@functools.cache
def _block_works(block: int) -> bool:
    """Whether the kernel of this block size compiles, runs and agrees with torch on a GPU."""
    return agrees(
        functools.partial(_try_block, block), f"Exchange among up to {block} tokens"
    )


def _try_block(block: int) -> bool:
    """Compile and run the kernel, and compare what enters with torch's."""
    # Explicitly float32: vLLM sets another default while it loads a model.
    quality = torch.tensor([[1.0, 2.0, 4.0, 3.0]], dtype=torch.float32, device="cuda")
    leaving = torch.tensor([[0, 1]], device="cuda")
    call = Exchange(
        cosine=torch.eye(4, dtype=torch.float32, device="cuda")[None],
        nearest=torch.full_like(quality, -torch.inf),
        quality=quality,
        pool=quality > 2,
        leaving=leaving,
        least=quality.gather(1, leaving),
        diversity=0.5,
    )
    return torch.equal(exchange_triton(call, block=block), exchange_torch(call))
