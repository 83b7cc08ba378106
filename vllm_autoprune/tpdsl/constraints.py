"""Selection constraints (C): how far the reference selection may be revised, and in what order.

Knows nothing about the base policy that made the reference selection.

Every selector keeps at least r_min reference tokens and makes at most q_e exchanges, whatever
the scores hold, so |T_D| = |T_A| <= q_e and |T_P \\ T_D| >= r_min by construction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.capped import capped_greedy_map
from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.tpdsl.atom import ATOMS, AtomCall, OneOf, atom
from vllm_autoprune.tpdsl.kernels import Kernel, conditioned, run_kernel
from vllm_autoprune.tpdsl.numerics import mask_of, ranked
from vllm_autoprune.tpdsl.partitions import PartitionCall, run_partition
from vllm_autoprune.tpdsl.scoring import relevance
from vllm_autoprune.tpdsl.tokens import VisualTokens


class SelectorCall(AtomCall):
    """A selector; one without parameters decides by itself how much it exchanges: everything."""

    def bounds(self, budget: int) -> tuple[int, int]:
        """(q_e, r_min) at K = ``budget``."""
        return budget, 0

    @property
    def insists_on(self) -> int | None:
        """r_min where the state states it; None where it follows from K."""
        return None


class PreservingSelector(SelectorCall):
    """A selector that exchanges nothing."""

    def bounds(self, budget: int) -> tuple[int, int]:
        """No exchange at any K."""
        return 0, budget


class BoundedSelector(SelectorCall):
    """A selector with its exchange quota and the least share of the base policy it keeps."""

    q_e: int = Field(2, ge=0, le=640, description="exchange quota: most tokens replaced")
    r_min: int | None = Field(
        None, ge=0, le=640, description="fewest reference tokens kept; null: K - q_e"
    )

    def bounds(self, budget: int) -> tuple[int, int]:
        """The quota never exceeds what r_min leaves exchangeable."""
        r_min = max(0, budget - self.q_e) if self.r_min is None else min(self.r_min, budget)
        return min(self.q_e, budget - r_min), r_min

    @property
    def insists_on(self) -> int | None:
        """r_min as the state has it."""
        return self.r_min


class MarginSelector(BoundedSelector):
    """Parameters of reference_margin_gated_exchange_selector."""

    margin: float = Field(0.05, ge=0.0, le=1.0, description="least gain in quality of a swap")


class StrictSelector(BoundedSelector):
    """Parameters of reference_strict_margin_exchange_selector."""

    margin: float = Field(0.1, ge=0.0, le=2.0, description="least relative gain in quality")
    max_sim: float = Field(0.95, ge=0.5, le=1.0, description="most alike to any kept token")


class CappedSelector(BoundedSelector):
    """Parameters of constrained_pool_dpp_selector."""

    cell_cap: int = Field(4, ge=1, le=64, description="most tokens of one part of the partition")


class MarginalSelector(BoundedSelector):
    """Parameters of maximal_marginal_relevance_pool_selector."""

    lam: float = Field(0.7, ge=0.0, le=1.0, description="weight of quality against likeness")


def resolve_constraints(call: SelectorCall, budget: int) -> tuple[int, int]:
    """(q_e, r_min) at this budget."""
    return call.bounds(budget)


@dataclass(frozen=True)
class Revision:
    """What a selector decides on, for B images.

    tokens as the state's token view shows them; picks ``(B, P)`` in pick order; pool ``(B, N)``
    bool, outside the picks; g ``(B, N)``; quota is q_e at this K. Kernel and labels are made when
    a selector reads them.
    """

    tokens: VisualTokens
    picks: Tensor
    pool: Tensor
    g: Tensor
    quota: int
    kernel_call: AtomCall
    partition_call: PartitionCall

    @cached_property
    def kernel(self) -> Kernel:
        """The state's kernel."""
        return run_kernel(self.kernel_call, self.tokens, self.g)

    @cached_property
    def labels(self) -> Tensor:
        """``(B, N)`` labels of the state's partition."""
        return run_partition(self.partition_call, self.tokens)

    @cached_property
    def reference(self) -> Tensor:
        """``(B, N)`` mask of the picks."""
        return mask_of(self.picks, self.g.shape[1])

    @cached_property
    def outgoing(self) -> Tensor:
        """``(B, q)`` reference tokens of lowest quality, the lowest first."""
        lowest = ranked(self.g.masked_fill(~self.reference, torch.inf)).flip(1)
        return lowest[:, : self.quota]


def _swapped(revision: Revision, worth_it: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Swap pair by pair while ``worth_it(g of the candidate, g of the reference token)``."""
    g, pool, kept, outgoing = revision.g, revision.pool, revision.reference, revision.outgoing
    incoming = ranked(g.masked_fill(~pool, -torch.inf))[:, : revision.quota]
    # Both sides are sorted, so pair i is the best pair left once the pairs before it are made,
    # and the comparison can only fail from some pair on. NaN compares false: no exchange.
    gains, loses = g.gather(1, incoming), g.gather(1, outgoing)
    swap = (gains > loses) & worth_it(gains, loses) & pool.gather(1, incoming)
    kept = kept.scatter(1, outgoing, kept.gather(1, outgoing) & ~swap)
    return kept.scatter(1, incoming, kept.gather(1, incoming) | swap)


@atom("selection_constraints", BoundedSelector)
def reference_residual_exchange_selector(call: BoundedSelector, revision: Revision) -> Tensor:
    """Swap the lowest-quality reference tokens for better candidates, best pair first."""
    return _swapped(revision, lambda gains, loses: gains > loses)


@atom("selection_constraints", MarginSelector)
def reference_margin_gated_exchange_selector(call: MarginSelector, revision: Revision) -> Tensor:
    """Swap as the residual exchange does, where quality rises by at least the margin."""
    return _swapped(revision, lambda gains, loses: gains - loses >= call.margin)


@atom("selection_constraints", PreservingSelector, origin="listed")
def reference_strict_preservation_selector(call: PreservingSelector, revision: Revision) -> Tensor:
    """Keep the reference selection as it is: the base policy alone."""
    return revision.reference


@atom("selection_constraints", SelectorCall, origin="listed")
def quality_topk_selector(call: SelectorCall, revision: Revision) -> Tensor:
    """Keep the tokens of highest quality, whatever the base policy picked."""
    best = ranked(revision.g)[:, : revision.picks.shape[1]]
    return mask_of(best, revision.g.shape[1])


Admits = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(likeness, g, leaving) -> what each token is worth as a candidate ``(B, N)``, and what it has to
exceed ``(B, 1)``; likeness ``(B, N)`` is the largest cosine to what would be kept."""


def _in_turn(revision: Revision, admits: Admits) -> Tensor:
    """One swap after the other, each candidate looked at beside what is kept by then.

    Swap i takes out reference token i of ``outgoing`` or ends the exchange, so what is kept of the
    reference selection is known before the first swap; only what came in is not.
    """
    cosine, kept, pool = revision.tokens.cosine, revision.reference, revision.pool
    outgoing, count = revision.outgoing, revision.g.shape[1]
    staying = kept.scatter(1, outgoing, False)
    entered = cosine.masked_fill(~staying[:, :, None], -torch.inf).amax(dim=1)
    leaving_rows = cosine.gather(1, outgoing[:, :, None].expand(-1, -1, count))
    going_on = torch.ones_like(kept[:, :1])
    for step in range(outgoing.shape[1]):
        leaving = outgoing[:, step : step + 1]
        waiting = leaving_rows[:, step + 1 :]
        likeness = torch.cat([waiting, entered[:, None]], dim=1).amax(dim=1)
        worth, bar = admits(likeness, revision.g, leaving)
        open_ = pool & ~worth.isnan()
        best, entering = worth.masked_fill(~open_, -torch.inf).max(dim=1, keepdim=True)
        going_on = going_on & (best > bar) & open_.gather(1, entering)
        kept = kept.scatter(1, leaving, kept.gather(1, leaving) & ~going_on)
        kept = kept.scatter(1, entering, kept.gather(1, entering) | going_on)
        pool = pool.scatter(1, entering, pool.gather(1, entering) & ~going_on)
        row = cosine.gather(1, entering[:, :, None].expand(-1, -1, count))[:, 0]
        entered = torch.where(going_on, torch.maximum(entered, row), entered)
    return kept


@atom("selection_constraints", StrictSelector)
def reference_strict_margin_exchange_selector(call: StrictSelector, revision: Revision) -> Tensor:
    """Swap for a relative gain in quality, and never for a token too much like a kept one."""

    def admits(likeness: Tensor, g: Tensor, leaving: Tensor) -> tuple[Tensor, Tensor]:
        now = g.gather(1, leaving)
        enough = (likeness <= call.max_sim) & (g >= (1 + call.margin) * now)
        return g.masked_fill(~enough, -torch.inf), now

    return _in_turn(revision, admits)


@atom("selection_constraints", MarginalSelector, origin="listed")
def maximal_marginal_relevance_pool_selector(call: MarginalSelector, revision: Revision) -> Tensor:
    """Swap for tokens that are better, or less like what is kept, than those they replace."""

    def admits(likeness: Tensor, g: Tensor, leaving: Tensor) -> tuple[Tensor, Tensor]:
        # With nothing else kept there is nothing to be like.
        worth = call.lam * g - (1 - call.lam) * likeness.clamp_min(-1)
        return worth, worth.gather(1, leaving)

    return _in_turn(revision, admits)


def _anchored(revision: Revision, kernel: Kernel) -> Tensor:
    """Greedy MAP over pool and reference, conditioned on the picks that cannot be exchanged."""
    picks, count = revision.picks, revision.g.shape[1]
    order = greedy_map(
        kernel.similarity,
        kernel.quality,
        picks.shape[1],
        anchors=picks[:, : picks.shape[1] - revision.quota],
        eligible=revision.pool | revision.reference,
    )
    return mask_of(order, count)


@atom("selection_constraints", BoundedSelector)
def anchor_controlled_pool_dpp_selector(call: BoundedSelector, revision: Revision) -> Tensor:
    """Anchor the base policy's first picks, then greedy DPP over pool and remaining picks."""
    return _anchored(revision, revision.kernel)


@atom("selection_constraints", BoundedSelector, needs=frozenset({"instruction"}))
def runtime_reference_anchor_pool_dpp_selector(call: BoundedSelector, revision: Revision) -> Tensor:
    """As the anchored DPP, with a kernel conditioned on relevance to the current instruction."""
    instruction = revision.tokens.require_instruction()
    r = relevance(instruction, sign=instruction.sign)
    return _anchored(revision, conditioned(revision.tokens, r))


@atom("selection_constraints", CappedSelector)
def constrained_pool_dpp_selector(call: CappedSelector, revision: Revision) -> Tensor:
    """As the anchored DPP, with a cap on the tokens of each part of the state's partition."""
    picks = revision.picks
    order = capped_greedy_map(
        revision.kernel.similarity,
        revision.kernel.quality,
        picks.shape[1],
        anchors=picks[:, : picks.shape[1] - revision.quota],
        eligible=revision.pool | revision.reference,
        cells=revision.labels,
        cap=call.cell_cap,
    )
    return mask_of(order, revision.g.shape[1])


Selector = Annotated[SelectorCall, OneOf("selection_constraints", SelectorCall)]


def run_selector(call: SelectorCall, revision: Revision) -> Tensor:
    """Refined subset as a mask ``(B, N)``, P tokens of each image."""
    mask = ATOMS.of(call).function(call, revision)
    assert isinstance(mask, Tensor)
    return mask
