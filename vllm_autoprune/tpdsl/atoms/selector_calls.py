"""Parameters of the selectors (C), and the bounds q_e and r_min that follow from a budget."""

from __future__ import annotations

from pydantic import Field

from vllm_autoprune.tpdsl.registry import AtomCall, added


class SelectorCall(AtomCall):
    """A selector; without bounds of its own it may exchange all K tokens."""

    def bounds(self, budget: int) -> tuple[int, int]:
        """(q_e, r_min) at K = ``budget``."""
        return budget, 0

    @property
    def insists_on(self) -> int | None:
        """r_min if the state sets it; None if it follows from K."""
        return None


class PreservingSelector(SelectorCall):
    """A selector that exchanges nothing."""

    def bounds(self, budget: int) -> tuple[int, int]:
        """(0, K): no exchange."""
        return 0, budget


class BoundedSelector(SelectorCall):
    """A selector with an exchange quota q_e and a minimum r_min of reference tokens."""

    q_e: int = Field(
        2, ge=0, le=640, description="exchange quota: largest number of reference tokens replaced"
    )
    r_min: int | None = Field(
        None, ge=0, le=640, description="smallest number of reference tokens kept; null: K - q_e"
    )

    def bounds(self, budget: int) -> tuple[int, int]:
        """q_e is cut to K - r_min."""
        r_min = max(0, budget - self.q_e) if self.r_min is None else min(self.r_min, budget)
        return min(self.q_e, budget - r_min), r_min

    @property
    def insists_on(self) -> int | None:
        """r_min of the state."""
        return self.r_min


class ResidualSelector(BoundedSelector):
    """Parameters of reference_residual_exchange_selector."""

    lam: float | None = added(
        None,
        ge=0.0,
        le=1.0,
        description="q_e tokens are exchanged, whatever is gained; they enter by quality^power "
        "less lam x the largest kernel to a kept token; null: pairs, while quality rises",
    )
    keep_weight: float = added(
        0.0,
        ge=0.0,
        le=1.0,
        description="with lam: added to the quality of every reference token alike, so it changes "
        "no pick; kept because the released search varies it",
    )
    power: float = added(
        1.0, ge=0.25, le=4.0, description="with lam: power of the normalised quality"
    )


class MarginSelector(BoundedSelector):
    """Parameters of reference_margin_gated_exchange_selector."""

    margin: float = Field(
        0.05, ge=0.0, le=1.0, description="smallest gain in quality of an exchange"
    )


class StrictSelector(BoundedSelector):
    """Parameters of reference_strict_margin_exchange_selector."""

    margin: float = Field(
        0.1, ge=0.0, le=2.0, description="smallest relative gain in quality of an exchange"
    )
    max_sim: float = Field(0.95, ge=0.5, le=1.0, description="largest cosine to any kept token")


class CappedSelector(BoundedSelector):
    """Parameters of constrained_pool_dpp_selector."""

    cell_cap: int = Field(
        4,
        ge=1,
        le=64,
        description="largest number of kept tokens per part of the partition; anchors may exceed "
        "it, and it is ignored where every part is full",
    )


class MarginalSelector(BoundedSelector):
    """Parameters of maximal_marginal_relevance_pool_selector."""

    lam: float = Field(
        0.7, ge=0.0, le=1.0, description="weight of quality; 1 - lam is the weight of similarity"
    )


def resolve_constraints(call: SelectorCall, budget: int) -> tuple[int, int]:
    """(q_e, r_min) at this budget."""
    return call.bounds(budget)
