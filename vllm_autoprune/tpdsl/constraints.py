"""Selection constraints (C): how the reference selection may be revised, and how far.

Knows nothing about the base policy that made the reference selection.

Every selector keeps at least r_min reference tokens and makes at most q_e exchanges, whatever
the scores hold, so |T_D| = |T_A| <= q_e and |T_P \\ T_D| >= r_min by construction.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.tpdsl.atom import ATOMS, AtomCall, OneOf, atom
from vllm_autoprune.tpdsl.kernels import Kernel
from vllm_autoprune.tpdsl.numerics import mask_of, ranked


class SelectorCall(AtomCall):
    """A selector with its exchange quota and the least share of the base policy it keeps."""

    q_e: int = Field(2, ge=0, le=640, description="exchange quota: most tokens replaced")
    r_min: int | None = Field(
        None, ge=0, le=640, description="fewest reference tokens kept; null: K - q_e"
    )


Selector = Annotated[SelectorCall, OneOf("selection_constraints")]


def resolve_constraints(call: SelectorCall, budget: int) -> tuple[int, int]:
    """(q_e, r_min) at this budget: the quota never exceeds what r_min leaves exchangeable."""
    r_min = max(0, budget - call.q_e) if call.r_min is None else min(call.r_min, budget)
    return min(call.q_e, budget - r_min), r_min


@atom("selection_constraints", SelectorCall)
def reference_residual_exchange_selector(
    call: SelectorCall, reference: Tensor, pool: Tensor, g: Tensor, kernel: Kernel, quota: int
) -> Tensor:
    """Swap the lowest-quality reference tokens for better candidates, best pair first."""
    kept = mask_of(reference, g.shape[1])
    incoming = ranked(g.masked_fill(~pool, -torch.inf))[:, :quota]
    outgoing = ranked(g.masked_fill(~kept, torch.inf)).flip(1)[:, :quota]
    # Both sides are sorted, so pair i is the best pair left once the pairs before it are made,
    # and the comparison can only fail from some pair on. NaN compares false: no exchange.
    swap = (g.gather(1, incoming) > g.gather(1, outgoing)) & pool.gather(1, incoming)
    kept = kept.scatter(1, outgoing, kept.gather(1, outgoing) & ~swap)
    return kept.scatter(1, incoming, kept.gather(1, incoming) | swap)


@atom("selection_constraints", SelectorCall)
def anchor_controlled_pool_dpp_selector(
    call: SelectorCall, reference: Tensor, pool: Tensor, g: Tensor, kernel: Kernel, quota: int
) -> Tensor:
    """Anchor the base policy's first picks, then greedy DPP over pool and remaining picks."""
    budget = reference.shape[1]
    eligible = pool | mask_of(reference, g.shape[1])
    order = greedy_map(
        kernel.similarity,
        kernel.quality,
        budget,
        anchors=reference[:, : budget - quota],
        eligible=eligible,
    )
    return mask_of(order, g.shape[1])


def run_selector(
    call: SelectorCall, reference: Tensor, pool: Tensor, g: Tensor, kernel: Kernel, quota: int
) -> Tensor:
    """Refined subset as a mask ``(B, N)`` from the picks ``(B, K)``, pool and quality."""
    mask = ATOMS.of(call).function(call, reference, pool, g, kernel, quota)
    assert isinstance(mask, Tensor)
    return mask
