"""Materialize: resolve a state at a budget K into an executable policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from pydantic import JsonValue

from vllm_autoprune.errors import BudgetError, Problem
from vllm_autoprune.tpdsl.atoms.source import MAX_BUDGET, BudgetCall
from vllm_autoprune.tpdsl.base_policy import (
    BASE_POLICIES,
    INSTRUCTION_NEEDS,
    BasePolicy,
)
from vllm_autoprune.tpdsl.frames import Frames
from vllm_autoprune.tpdsl.state import SCHEMA, Core, PruningState
from vllm_autoprune.tpdsl.tokens import Need, RankAt, Shares


@dataclass(frozen=True, slots=True)
class PruningPolicy:
    """pi_alpha^(K): a state with every budget-dependent field resolved (equation 6).

    ``by_size`` gives K where it depends on the size of an image: ``budget`` is then the largest K
    of any image, and :meth:`at` gives the policy for one size. The first ``core`` tokens of K are
    chosen without the question, the others given them; ``cover`` is the part of all tokens that may
    be merged into the kept ones, the most similar ones. ``clip``: K is of clips, by the rules of
    the state's frames.
    """

    state: PruningState
    budget: int
    quota: int
    r_min: int
    by_size: BudgetCall | None = None
    core: int = 0
    cover: float = 1.0
    clip: bool = False

    @classmethod
    def of_core(cls, state: PruningState, core: int) -> PruningPolicy:
        """The policy that keeps the core alone, K_c tokens: it reads no question, exchanges none.

        Raises :class:`BudgetError` for a state that has no core.
        """
        if state.core is None:
            raise _no_core(state)
        alone = _core_state(state.core, state.rank_at, state.shares, state.frames)
        return cls(alone, core, 0, core, cover=state.core.cover)

    @classmethod
    def of_recall(cls, state: PruningState, budget: int) -> PruningPolicy:
        """The policy that keeps K more tokens of an image, given all that are kept already."""
        quota, _ = state.constraints.selector.bounds(budget)
        quota = min(quota, budget)
        return cls(state, budget, quota, budget - quota)

    @property
    def delta(self) -> PruningPolicy:
        """The policy that keeps the other tokens of K, given the core, of which all stay."""
        r_min = max(0, self.r_min - self.core)
        return replace(self, budget=self.budget - self.core, r_min=r_min, core=0)

    @property
    def is_core(self) -> bool:
        """Whether this policy keeps the core of another one."""
        return self.cover < 1

    @property
    def base(self) -> BasePolicy:
        """Base policy whose selection is refined."""
        return BASE_POLICIES[self.state.base_policy.name]

    @property
    def refines(self) -> bool:
        """Whether tokens can be exchanged; if not, the base policy's tokens are kept."""
        return self.quota > 0

    @property
    def reads_quality(self) -> bool:
        """Whether token quality g is read, by the exchange or by the order of rows."""
        return self.refines or self.state.orders_by_quality

    @property
    def needs(self) -> frozenset[Need]:
        """Optional inputs that this policy reads."""
        if self.core == self.budget:
            return PruningPolicy.of_core(self.state, self.core).needs
        return self.state.needs(exchange=self.refines)

    @property
    def reads_instruction(self) -> bool:
        """Whether two questions about one image may keep different tokens."""
        return not self.needs.isdisjoint(INSTRUCTION_NEEDS)

    @property
    def falls_back(self) -> bool:
        """Whether the base policy's selection is served if this policy is invalid."""
        return any(call.atom == "fallback_to_selection" for call in self.state.safety)

    def tokens_kept(self, tokens: int, tiles: int = 1) -> int:
        """Tokens kept of an image of N tokens in T tiles, or a clip of T frames, min(K, N)."""
        return min(self.at(tokens, tiles).budget, tokens)

    def at(self, tokens: int, tiles: int = 1) -> PruningPolicy:
        """Policy for images of N tokens in T tiles; itself if K does not depend on the size."""
        if self.by_size is None:
            return self
        count = self.by_size.tokens_kept(tokens, tiles)
        if not self.clip or self.state.frames is None:
            return materialize(self.state, count)
        least = tokens // tiles if self.state.frames.first == "whole" else 1
        return materialize_clip(self.state, max(count, least))


def materialize(
    state: PruningState, budget: int | BudgetCall | None = None, core: int | None = None
) -> PruningPolicy:
    """Policy of a state at its own budget or at another one, K or a rule for it.

    Only budget-dependent fields are resolved: K, r_min = K - q_e if the state's r_min is null, and
    the number of core tokens, if the state has a core. ``core`` is another number of them, which a
    server sets so that the core fills whole KV blocks. Raises :class:`BudgetError` if the state
    does not allow the budget.
    """
    return _materialize(state, state.budget if budget is None else budget, core)


def materialize_clip(
    state: PruningState, budget: int | BudgetCall | None = None, core: int | None = None
) -> PruningPolicy:
    """Policy of a state for clips, as :func:`materialize`, by its ``frames`` or at another budget.

    :meth:`PruningPolicy.tokens_kept` gives K of a clip. A number K is kept exactly; of a rule it is
    at least what the first frame takes, where that stays whole. Raises :class:`BudgetError` for a
    state without ``frames``, which leaves videos whole.
    """
    if state.frames is None:
        what = f"state {state.name!r} leaves videos whole"
        fix = 'add "frames": {} to it'
        raise BudgetError("budget of a clip", [Problem("/frames", what, fix)])
    return _materialize(
        state, state.frames.tokens if budget is None else budget, core, state.frames
    )


def _materialize(
    state: PruningState,
    rule: int | BudgetCall,
    core: int | None,
    frames: Frames | None = None,
) -> PruningPolicy:
    """The policy for images, or for clips by the rules of frames."""
    clip = frames is not None
    least, most = rule.range() if isinstance(rule, BudgetCall) else (rule, rule)
    if (
        isinstance(most, bool)
        or not isinstance(most, int)
        or not 1 <= most <= MAX_BUDGET
    ):
        what = f"K = {most!r} is not a number of tokens"
        fix = f"give a whole number from 1 to {MAX_BUDGET}"
        raise BudgetError(
            f"budget of state {state.name!r}", [Problem("/budget", what, fix)]
        )
    if problems := state.budget_problems(least, most, clip=clip):
        raise BudgetError(f"budget of state {state.name!r}", problems)
    if isinstance(rule, BudgetCall) and frames is not None and frames.first == "whole":
        most = MAX_BUDGET
    quota, r_min = state.constraints.selector.bounds(most)
    by_size = rule if isinstance(rule, BudgetCall) and least != most else None
    if state.core is None and core:
        raise _no_core(state)
    if state.core is None:
        return PruningPolicy(state, most, quota, r_min, by_size, clip=clip)
    core = state.core.tokens(most) if core is None else core
    if not 0 <= core <= most:
        fix = f"use 0 to {most}"
        raise BudgetError(
            "core", [Problem("/core", f"{core} core tokens of K = {most}", fix)]
        )
    return PruningPolicy(
        state, most, min(quota, most - core), r_min, by_size, core, clip=clip
    )


def _no_core(state: PruningState) -> BudgetError:
    fix = "leave it out, or use a state with a core"
    return BudgetError(
        "core", [Problem("/core", f"state {state.name!r} has none", fix)]
    )


_CORE_ALONE: dict[str, JsonValue] = {
    "schema": SCHEMA,
    "name": "core",
    "budget": {"atom": "fixed_budget@32"},
    "scoring": {
        "signals": [{"atom": "visual_token_norm_saliency", "weight": 0.0}],
        "kernel": {"atom": "pairwise_cosine_kernel"},
        "fusion": {"atom": "weighted_product_fusion"},
    },
    "constraints": {
        "pool": [{"atom": "quality_pool_builder"}],
        "selector": {"atom": "reference_strict_preservation_selector"},
    },
    "safety": ["preserve_budget", "no_shape_change", "deterministic"],
}
"""A state that does nothing beside its base policy and its reassembly."""


@lru_cache(maxsize=128)
def _core_state(
    core: Core, rank_at: RankAt, shares: Shares, frames: Frames | None
) -> PruningState:
    fields: dict[str, JsonValue] = {"rank_at": rank_at, "shares": shares}
    if frames is not None:
        fields["frames"] = frames.model_dump(mode="json")
    policy = core.policy.model_dump(mode="json")
    reassembly = {"atom": "mean_residual", "strength": core.strength}
    return PruningState.model_validate(
        {**_CORE_ALONE, **fields, "base_policy": policy, "reassembly": reassembly}
    )
