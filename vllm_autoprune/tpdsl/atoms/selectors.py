"""Selectors (C): exchange tokens of the reference selection for candidates, within bounds.

For any scores, a selector keeps at least r_min reference tokens and makes at most q_e
exchanges: |T_D| = |T_A| <= q_e and |T_P \\ T_D| >= r_min by construction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.ops.exchange import exchange_tokens
from vllm_autoprune.ops.exchange_torch import Exchange
from vllm_autoprune.ops.greedy import Cap, Conditioned, capped_greedy_map
from vllm_autoprune.ops.rowwise import (
    argmax_within,
    mask_from_indices,
    min_max_normalise,
    rank_descending,
)
from vllm_autoprune.tpdsl.atoms.pools import PartitionCall
from vllm_autoprune.tpdsl.atoms.scoring import Kernel, KernelCall
from vllm_autoprune.tpdsl.base_policy import Given
from vllm_autoprune.tpdsl.registry import AtomCall, OneOf, added, atom, run
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens


class SelectorCall(AtomCall):
    """A selector. Unless it defines bounds, it may exchange all K tokens."""

    def bounds(self, budget: int) -> tuple[int, int]:
        """(q_e, r_min) at K = ``budget``."""
        return budget, 0

    @property
    def explicit_r_min(self) -> int | None:
        """r_min if the state sets it; None if it follows from K."""
        return None

    def reads_quality(self, kernel: KernelCall) -> bool:
        """Whether token quality decides, besides the pool and with ``kernel``, what is kept."""
        return True

    @property
    def reads_kernel(self) -> bool:
        """Whether the state's similarity kernel decides what is kept."""
        return False


class _PreservingSelector(SelectorCall):
    """A selector that exchanges nothing."""

    def bounds(self, budget: int) -> tuple[int, int]:
        """(0, K): no exchange."""
        return 0, budget


class _BoundedSelector(SelectorCall):
    """A selector with an exchange quota q_e and a minimum r_min of reference tokens."""

    q_e: int = Field(
        2,
        ge=0,
        le=640,
        description="exchange quota: largest number of reference tokens replaced",
    )
    r_min: int | None = Field(
        None,
        ge=0,
        le=640,
        description="smallest number of reference tokens kept; null: K - q_e",
    )

    def bounds(self, budget: int) -> tuple[int, int]:
        """(q_e, r_min) at K = ``budget``, with q_e cut to K - r_min."""
        r_min = (
            max(0, budget - self.q_e) if self.r_min is None else min(self.r_min, budget)
        )
        return min(self.q_e, budget - r_min), r_min

    @property
    def explicit_r_min(self) -> int | None:
        """The r_min that the state sets, or None."""
        return self.r_min


class _ResidualSelector(_BoundedSelector):
    """Parameters of reference_residual_exchange_selector."""

    lam: float | None = added(
        None,
        ge=0.0,
        le=1.0,
        description="q_e tokens are exchanged, whatever is gained; they enter by quality^power "
        "less lam x the largest kernel to a kept token; null: pairs are exchanged while quality "
        "rises",
    )
    keep_weight: float = added(
        0.0,
        ge=0.0,
        le=1.0,
        description="with lam: added to the quality of every reference token alike, so it changes "
        "no pick",
    )
    power: float = added(
        1.0, ge=0.25, le=4.0, description="with lam: power of the normalised quality"
    )

    def describe(self, doc: str) -> str:
        """Whether an exchange must gain quality."""
        if self.lam is None:
            return doc
        return (
            "Replace the q_e reference tokens of lowest quality, whatever is gained, by tokens of "
            f"the pool of high quality{' that are unlike the kept ones' * (self.lam > 0)}."
        )

    @property
    def reads_kernel(self) -> bool:
        """Whether lam is set."""
        return self.lam is not None


class _MarginSelector(_BoundedSelector):
    margin: float = Field(
        0.05, ge=0.0, le=1.0, description="smallest gain in quality of an exchange"
    )


class _StrictSelector(_BoundedSelector):
    margin: float = Field(
        0.1,
        ge=0.0,
        le=2.0,
        description="smallest relative gain: quality of at least (1 + margin) x that of the token "
        "that leaves",
    )
    max_sim: float = Field(
        0.95, ge=0.5, le=1.0, description="largest cosine to any kept token"
    )


class _AnchoredSelector(_BoundedSelector):
    """Parameters of anchor_controlled_pool_dpp_selector."""

    def reads_quality(self, kernel: KernelCall) -> bool:
        """Whether the kernel does."""
        return kernel.reads_quality

    @property
    def reads_kernel(self) -> bool:
        """True: it is the kernel of the DPP."""
        return True


class _CappedSelector(_AnchoredSelector):
    cell_cap: int = Field(
        4,
        ge=1,
        le=64,
        description="largest number of kept tokens per part of the partition; anchors may exceed "
        "it, and it is ignored where every part is full",
    )


class _InstructionSelector(_BoundedSelector):
    """Parameters of runtime_reference_anchor_pool_dpp_selector."""

    def reads_quality(self, kernel: KernelCall) -> bool:
        """False: relevance to the instruction in place of it."""
        return False


class _MarginalSelector(_BoundedSelector):
    lam: float = Field(
        0.7,
        ge=0.0,
        le=1.0,
        description="relevance: lam x quality less (1 - lam) x the largest cosine to a kept token",
    )


@dataclass(frozen=True)
class SelectorInputs:
    """Inputs of a selector, for B images.

    tokens are seen in the state's token view. picks ``(B, P)`` are in pick order, and pool ``(B,
    N)`` bool is disjoint from them. g ``(B, N)`` is token quality, and quota is q_e at this K.
    Kernel and labels are computed when a selector first reads them. With ``start``, its given
    tokens are kept besides the picks, and no closed token may enter.
    """

    tokens: VisualTokens
    picks: Tensor
    pool: Tensor
    g: Tensor
    quota: int
    kernel_call: AtomCall
    partition_call: PartitionCall
    start: Given | None = None

    @cached_property
    def kernel(self) -> Kernel:
        """Similarity kernel of the state."""
        return run(Kernel, self.kernel_call, self.tokens, self.g)

    @cached_property
    def labels(self) -> Tensor:
        """Partition label ``(B, N)`` of each token, by the state's partition."""
        return run(Tensor, self.partition_call, self.tokens)

    @cached_property
    def reference(self) -> Tensor:
        """Mask ``(B, N)`` of the picks."""
        return mask_from_indices(self.picks, self.g.shape[1])

    @cached_property
    def outgoing(self) -> Tensor:
        """The q reference tokens of lowest quality ``(B, q)``, in ascending order of quality."""
        # Made finite, so that every reference token ranks below all other tokens, which are set to
        # infinity.
        quality = self.g.nan_to_num(nan=torch.finfo(self.g.dtype).max)
        lowest = rank_descending(quality.masked_fill(~self.reference, torch.inf)).flip(
            1
        )
        return lowest[:, : self.quota]

    @cached_property
    def staying(self) -> Tensor:
        """Mask ``(B, N)`` of the reference and given tokens that no exchange removes."""
        picks = self.reference.scatter(1, self.outgoing, False)
        if self.start is None:
            return picks
        return picks | mask_from_indices(self.start.indices, picks.shape[1])

    def select_anchored(self, kernel: Kernel, cap: int | None = None) -> Tensor:
        """Mask ``(B, N)`` of the tokens that greedy MAP keeps of pool and reference selection.

        It is conditioned on the first P - q picks as anchors and on the given tokens; ``cap``
        limits the number of tokens in each part of the partition.
        """
        count = self.picks.shape[1]
        conditioned = None
        anchors = self.picks[:, : count - self.quota]
        eligible = self.pool | self.reference
        if self.start is not None:
            conditioned = Conditioned.on(kernel.similarity, self.start.indices)
        inputs = (kernel.similarity, kernel.quality, count)
        if cap is None:
            picks = greedy_map(
                *inputs, anchors=anchors, eligible=eligible, conditioned=conditioned
            )
        else:
            picks = capped_greedy_map(
                *inputs,
                Cap(self.labels, cap),
                anchors=anchors,
                eligible=eligible,
                conditioned=conditioned,
            )
        return mask_from_indices(picks, self.g.shape[1])


def _exchange_pairs(
    inputs: SelectorInputs, accepts: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Exchange pair by pair while ``accepts(g of the candidate, g of the reference token)``."""
    g = inputs.g
    pool = inputs.pool
    selection = inputs.reference
    outgoing = inputs.outgoing
    incoming = rank_descending(g.masked_fill(~pool, -torch.inf))[:, : inputs.quota]
    # Both sides are sorted, so pair i is the best one left after the pairs before it, and once a
    # pair is refused all later pairs are. NaN compares false: no exchange.
    gain = g.gather(1, incoming)
    loss = g.gather(1, outgoing)
    exchanged = (gain > loss) & accepts(gain, loss) & pool.gather(1, incoming)
    selection = selection.scatter(
        1, outgoing, selection.gather(1, outgoing) & ~exchanged
    )
    return selection.scatter(1, incoming, selection.gather(1, incoming) | exchanged)


@atom("selection_constraints", _ResidualSelector, cost=5.8)
def _reference_residual_exchange_selector(
    call: _ResidualSelector, inputs: SelectorInputs
) -> Tensor:
    """Exchange the lowest-quality reference tokens for better ones of the pool, best pair first."""
    if call.lam is not None:
        return _fill_quota(call.lam, call.power, inputs)
    return _exchange_pairs(inputs, lambda gain, loss: gain > loss)


def _fill_quota(lam: float, power: float, inputs: SelectorInputs) -> Tensor:
    """Replace the q reference tokens of lowest quality, even by candidates of lower quality.

    Candidates enter one by one, by ``quality^power - lam * largest kernel to a kept token``. Where
    the state compares tokens by tile, only kept tokens of the candidate's tile count. Once the pool
    is exhausted, the other reference tokens of lowest quality stay.
    """
    tokens = inputs.tokens
    pool = inputs.pool
    selection = inputs.staying
    batch, count = pool.shape
    scoped = tokens
    if (
        tokens.grid.tiles > 1 and tokens.tile_scope == "per_tile"
    ):  # treat each tile as an image
        grid = Grid(tokens.grid.height, tokens.grid.width)
        features = tokens.by_tile(tokens.features)
        scoped = VisualTokens(features, grid, known_cosine=lambda: tokens.tile_cosine)
    kernel = run(
        Kernel, inputs.kernel_call, scoped, inputs.g.view(-1, scoped.count)
    ).similarity
    quality = min_max_normalise(inputs.g).clamp_min(1e-6) ** power
    # Largest kernel (B, N) to a kept token; minus infinity while no token is kept.
    to_kept = kernel.masked_fill(~selection.view(-1, scoped.count, 1), -torch.inf).amax(
        dim=1
    )
    to_kept = to_kept.view(batch, count)
    rows = kernel.reshape(batch, count, scoped.count)
    tile = torch.arange(count, device=pool.device) // scoped.count
    for step in range(inputs.outgoing.shape[1]):
        score = quality - lam * to_kept.clamp_min(-1)
        entering = argmax_within(score.masked_fill(~pool, -torch.inf))[0][:, None]
        entering = torch.where(
            pool.any(dim=1, keepdim=True),
            entering,
            inputs.outgoing[:, step : step + 1],
        )
        selection = selection.scatter(1, entering, True)
        pool = pool.scatter(1, entering, False)
        row = rows.gather(1, entering[:, :, None].expand(-1, -1, scoped.count))[:, 0]
        row = row.repeat(1, count // scoped.count)
        to_kept = to_kept.maximum(row.masked_fill(tile != tile[entering], -torch.inf))
    if inputs.start is None:
        return selection
    return selection & ~mask_from_indices(inputs.start.indices, count)


@atom("selection_constraints", _MarginSelector, cost=0.1)
def _reference_margin_gated_exchange_selector(
    call: _MarginSelector, inputs: SelectorInputs
) -> Tensor:
    """Exchange as the residual selector, where quality rises by at least the margin."""
    return _exchange_pairs(inputs, lambda gain, loss: gain - loss >= call.margin)


@atom("selection_constraints", _PreservingSelector, origin="listed", cost=0.1)
def _reference_strict_preservation_selector(
    call: _PreservingSelector, inputs: SelectorInputs
) -> Tensor:
    """Keep the reference selection unchanged, so that the base policy alone decides."""
    return inputs.reference


@atom("selection_constraints", SelectorCall, origin="listed", cost=0.1)
def _quality_topk_selector(call: SelectorCall, inputs: SelectorInputs) -> Tensor:
    """Keep the K tokens of highest quality, regardless of reference selection and pool."""
    g = inputs.g
    if inputs.start is not None:
        g = g.masked_fill(inputs.start.closed, -torch.inf)
    best = rank_descending(g)[:, : inputs.picks.shape[1]]
    return mask_from_indices(best, inputs.g.shape[1])


def _exchange_in_sequence(
    inputs: SelectorInputs,
    *,
    least: Tensor | None = None,
    most_similar: float = torch.inf,
    relevance: float = 1.0,
    diversity: float = 0.0,
) -> Tensor:
    """Mask ``(B, N)`` after the exchanges of an :class:`Exchange`, of the lowest quality first."""
    cosine = inputs.tokens.cosine
    leaving = inputs.outgoing
    count = cosine.shape[1]
    staying = inputs.staying[:, :, None]
    if least is None:
        least = torch.full_like(leaving, -torch.inf, dtype=inputs.g.dtype)
    entering = exchange_tokens(
        Exchange(
            cosine=cosine,
            nearest=cosine.masked_fill(~staying, -torch.inf).amax(dim=1),
            quality=inputs.g,
            pool=inputs.pool,
            leaving=leaving,
            least=least,
            most_similar=most_similar,
            relevance=relevance,
            diversity=diversity,
        )
    )
    is_made = entering >= 0
    kept = inputs.reference.gather(1, leaving) & ~is_made
    remaining = inputs.reference.scatter(1, leaving, kept)
    # An exchange that is not made marks a column behind the tokens.
    marked = mask_from_indices(entering.where(is_made, count), count + 1)
    return remaining | marked[:, :count]


@atom("selection_constraints", _StrictSelector, cost=9.6)
def _reference_strict_margin_exchange_selector(
    call: _StrictSelector, inputs: SelectorInputs
) -> Tensor:
    """Exchange, the lowest quality first, for a relative gain, never for one like a kept token."""
    loss = inputs.g.gather(1, inputs.outgoing)
    return _exchange_in_sequence(
        inputs, least=(1 + call.margin) * loss, most_similar=call.max_sim
    )


@atom("selection_constraints", _MarginalSelector, origin="listed", cost=9.6)
def _maximal_marginal_relevance_pool_selector(
    call: _MarginalSelector, inputs: SelectorInputs
) -> Tensor:
    """Exchange for tokens of higher maximal marginal relevance than the replaced ones."""
    return _exchange_in_sequence(inputs, relevance=call.lam, diversity=1 - call.lam)


@atom("selection_constraints", _AnchoredSelector, cost=7.6)
def _anchor_controlled_pool_dpp_selector(
    call: _AnchoredSelector, inputs: SelectorInputs
) -> Tensor:
    """Anchored DPP: the first K - q_e picks (anchors) stay; greedy DPP over pool and picks."""
    return inputs.select_anchored(inputs.kernel)


@atom(
    "selection_constraints",
    _InstructionSelector,
    needs=frozenset({"instruction"}),
    cost=7.6,
)
def _runtime_reference_anchor_pool_dpp_selector(
    call: _InstructionSelector, inputs: SelectorInputs
) -> Tensor:
    """Anchored DPP by relevance to the instruction; signals act by the pool, the kernel not."""
    r = inputs.tokens.require_instruction().relevance()
    return inputs.select_anchored(Kernel.conditional(inputs.tokens, r))


@atom("selection_constraints", _CappedSelector, cost=28.3)  # the dearest partition
def _constrained_pool_dpp_selector(
    call: _CappedSelector, inputs: SelectorInputs
) -> Tensor:
    """Anchored DPP with a cap on the kept tokens of each part of the state's partition."""
    return inputs.select_anchored(inputs.kernel, call.cell_cap)


Selector = Annotated[SelectorCall, OneOf("selection_constraints", SelectorCall)]
