"""Materialize: resolve a state at a budget K into an executable policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from pydantic import JsonValue

from vllm_autoprune.errors import BudgetError
from vllm_autoprune.tpdsl.atoms.source import MAX_BUDGET, BudgetCall
from vllm_autoprune.tpdsl.base_policy import (
    BASE_POLICIES,
    INSTRUCTION_NEEDS,
    BasePolicy,
)
from vllm_autoprune.tpdsl.frames import Frames
from vllm_autoprune.tpdsl.loading import FOR_VIDEOS
from vllm_autoprune.tpdsl.state import SCHEMA, Core, PruningState
from vllm_autoprune.tpdsl.tokens import Need, RankAt, Shares


@dataclass(frozen=True, slots=True)
class PruningPolicy:
    """pi_alpha^(K): a state with every budget-dependent field resolved (equation 6).

    ``budget`` is K. If K depends on the size of an image, ``by_size`` is the rule for it,
    ``budget`` the largest K of any image, and :meth:`at` returns the policy for one size. The first
    ``core`` tokens of K are chosen without the question, and the others given the core. ``cover``
    is the fraction of all tokens, those most similar to the kept ones, that may be merged into
    them. With ``video``, K is that of a video, by the rules of the state's frames.
    """

    state: PruningState
    budget: int
    quota: int
    r_min: int
    by_size: BudgetCall | None = None
    core: int = 0
    cover: float = 1.0
    video: bool = False

    @property
    def delta(self) -> PruningPolicy:
        """The policy that keeps the rest of K, given the core, which no exchange removes."""
        r_min = max(0, self.r_min - self.core)
        return replace(self, budget=self.budget - self.core, r_min=r_min, core=0)

    @property
    def is_core(self) -> bool:
        """Whether this policy keeps only the core of another policy."""
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
            return _keep_core(self.state, self.core).needs
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
        """Number of kept tokens, min(K, N), of an image in T tiles or of a video of T frames."""
        return min(self.at(tokens, tiles).budget, tokens)

    def at(self, tokens: int, tiles: int = 1) -> PruningPolicy:
        """Policy for images of N tokens in T tiles; itself if K does not depend on the size."""
        if self.by_size is None:
            return self
        count = self.by_size.tokens_kept(tokens, tiles)
        frames = self.state.frames
        if self.video and frames is not None:
            minimum = tokens // tiles if frames.first == "whole" else 1
            count = max(count, minimum)
        return materialize(self.state, count, video=self.video)


PolicyPart = Literal["whole", "core", "recall"]
"""Which tokens of an image a policy keeps. ``whole``: all K tokens. ``core``: only the core, chosen
by a policy that reads no question and exchanges nothing. ``recall``: K more tokens, given all that
are kept already."""


def materialize(
    state: PruningState,
    budget: int | BudgetCall | None = None,
    core: int | None = None,
    *,
    part: PolicyPart = "whole",
    video: bool = False,
    exchange: bool = True,
) -> PruningPolicy:
    """Resolve a state into an executable policy, at its own budget or at ``budget``, K or a rule.

    Only budget-dependent fields are resolved: K, r_min = K - q_e if the state's r_min is null, and
    the number of core tokens if the state has a core. ``core`` overrides that number; a server sets
    it so that the core fills whole KV blocks.

    With ``video``, K is the budget of a video, by the state's ``frames``. A number is kept exactly;
    under a rule K is at least the size of the first frame, if that frame stays whole. Without
    ``exchange`` the base policy's tokens are kept unchanged. Raises :class:`BudgetError` if the
    state does not allow the budget, has no core, or leaves videos whole.
    """
    frames = state.frames if video else None
    if video and frames is None:
        what = f"state {state.name!r} leaves videos whole"
        fix = f'add "frames": {{}} to it, or take a shipped one with frames, as {FOR_VIDEOS}'
        raise BudgetError.of("/frames", what, fix, subject="budget of a video")
    if not exchange:
        state = _leave_out_exchange(state)
    if budget is None:
        budget = state.budget if frames is None else frames.tokens
    minimum, maximum = _find_range(state, budget)
    if part == "core":
        return _keep_core(state, maximum)
    selector = state.constraints.selector
    if part == "recall":
        quota, _ = selector.bounds(maximum)
        return PruningPolicy(state, maximum, quota, maximum - quota)
    if problems := state.budget_problems(minimum, maximum, video=video):
        raise BudgetError(f"budget of state {state.name!r}", problems)
    by_size = None
    if isinstance(budget, BudgetCall):
        if frames is not None and frames.first == "whole":
            maximum = MAX_BUDGET  # the whole first frame may have more tokens than the rule allows
        by_size = budget if minimum != maximum else None
    core = _count_core(state, core, maximum)
    quota, r_min = selector.bounds(maximum)
    quota = min(quota, maximum - core)
    return PruningPolicy(state, maximum, quota, r_min, by_size, core, video=video)


_leave_out_exchange = lru_cache(maxsize=512)(PruningState.without_exchange)
"""Cached so that the digest of a copy is computed once, not for every policy made from it."""


def _find_range(state: PruningState, budget: int | BudgetCall) -> tuple[int, int]:
    """Smallest and largest K of any image; raises unless they are valid numbers of tokens."""
    if isinstance(budget, BudgetCall):
        minimum, maximum = budget.range()
    else:
        minimum = maximum = budget
    is_count = isinstance(maximum, int) and not isinstance(maximum, bool)
    if not is_count or not 1 <= maximum <= MAX_BUDGET:
        what = f"K = {maximum!r} is not a number of tokens"
        fix = f"give a whole number from 1 to {MAX_BUDGET}"
        subject = f"budget of state {state.name!r}"
        raise BudgetError.of("/budget", what, fix, subject=subject)
    return minimum, maximum


def _count_core(state: PruningState, core: int | None, budget: int) -> int:
    """Number of core tokens at K = ``budget``: ``core``, or by the state's own share if None."""
    if core is None:
        return 0 if state.core is None else state.core.tokens(budget)
    if core and state.possible_core is None:
        raise _no_core(state)
    if not 0 <= core <= budget:
        what = f"{core} core tokens of K = {budget}"
        raise BudgetError.of("/core", what, f"use 0 to {budget}", subject="core")
    return core


def _keep_core(state: PruningState, core_tokens: int) -> PruningPolicy:
    """The policy that selects only the core, of ``core_tokens`` = K_c tokens."""
    core = state.possible_core
    if core is None:
        raise _no_core(state)
    core_state = _core_state(core, state.rank_at, state.shares, state.frames)
    return PruningPolicy(
        core_state, core_tokens, quota=0, r_min=core_tokens, cover=core.cover
    )


def _no_core(state: PruningState) -> BudgetError:
    fix = "leave it out, or use a state with a core"
    return BudgetError.of(
        "/core", f"state {state.name!r} has none", fix, subject="core"
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
"""A state that does nothing apart from its base policy and its reassembly."""


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
