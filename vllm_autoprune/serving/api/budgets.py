"""K of each image and video of a request, within what the server lets requests set.

A budget or field that is not allowed raises :class:`BudgetError` or :class:`RequestError`, which
vLLM answers by 400.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_autoprune.errors import Refusal, RequestError
from vllm_autoprune.serving.api.placeholders import TokenCount
from vllm_autoprune.serving.api.request import PruningRequest, split_shared_budget
from vllm_autoprune.serving.history import NO_CORE_FIX, History
from vllm_autoprune.serving.plan import ENTRY, NO_KEY, ItemPlan, TowerCut
from vllm_autoprune.serving.plan_rules import find_cost_problem
from vllm_autoprune.serving.request_rules import REQUESTS_FLAG, Level, RequestRules
from vllm_autoprune.serving.request_states import load_request_state
from vllm_autoprune.serving.served_state import ServedState, make_policy
from vllm_autoprune.serving.state_codec import encode_state
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.cost import FLAG
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tower import Tower

_MAX_COMPARED = 1 << 14
"""Number of tokens of a video that a state may compare with each other, whose cosines take a
gigabyte of float32. Policies that rank tokens by a score alone, as those for videos do, compare
only tokens of neighbouring frames."""

_PRUNING = (
    "budget",
    "video_budget",
    "state",
    "keep",
    "cells",
    "tower",
    "positions",
    "history",
)
"""Fields of a request that say how it is pruned."""

_SETTINGS = (
    "budget",
    "video_budget",
    "cells",
    "tower",
    "positions",
    "keep",
    "enabled",
    "recall",
    "history",
    "state",
)
"""Fields of a request that need a permission."""

_Requested = tuple[int | BudgetCall | None, str]
"""Budget of an item, None if the request sets none, and the request field whose range applies."""


def check_fields(served: ServedState, request: PruningRequest) -> PruningState | None:
    """Refuse the fields that requests may not set; returns the state that the request asks for.

    That is None if it asks for none, or for unpruned images.
    """
    rules = served.rules
    defaults = vars(PruningRequest())
    fields = [name for name in _SETTINGS if vars(request)[name] != defaults[name]]
    if request.recall == 0:
        fields.remove("recall")  # recall: 0 recalls nothing, as without the field
    for field in fields:
        level: Level = "budget"
        if field == "state":
            level = "shipped-states" if isinstance(request.state, str) else "states"
        if not rules.allows(level):
            what = f"this server's requests may set: {rules} ({REQUESTS_FLAG})"
            fix = f"leave it out, or serve with {REQUESTS_FLAG} {level}"
            where = f"{ENTRY}/{field}"
            raise RequestError.of(where, what, fix, kind=Refusal.NOT_ALLOWED)
    if (recall := request.recall or 0) > rules.maximum:
        what = f"K_r = {recall}, and requests may recall {rules.maximum} tokens at most"
        fix = f"ask for 0 to {rules.maximum}"
        raise RequestError.of(f"{ENTRY}/recall", what, fix, kind=Refusal.OUT_OF_RANGE)
    if not request.enabled:
        if names := [name for name in _PRUNING if name in fields]:
            what = f"false keeps every token, but {', '.join(map(repr, names))} is given as well"
            fix = f"leave out 'enabled' or {names[0]!r}"
            raise RequestError.of(f"{ENTRY}/enabled", what, fix)
        return None
    if request.state is None:
        return None
    return load_request_state(request.state, rules.cost)


@dataclass(frozen=True, slots=True)
class RequestBudgets:
    """Resolves K of each image and video of one request.

    The plans that it makes are of whole items, still without key and instruction.
    """

    served: ServedState
    request: PruningRequest
    state: PruningState | None
    """The state that the request asks for; None for the server's own."""

    @property
    def chosen_state(self) -> PruningState:
        """The state that chooses the tokens: the request's, or else the server's."""
        return self.served.state if self.state is None else self.state

    @property
    def history(self) -> History | None:
        """Which images keep their core alone; None if all keep K.

        Raises :class:`RequestError` if the number of their core's tokens is not known.
        """
        history = self.served.rules.history
        if self.request.history is not None:
            history = None if self.request.history == "none" else self.request.history
        if history is None or not self.request.enabled:
            return None
        if not history.has_core(self.chosen_state):
            where = f"{ENTRY}/history"
            what = f"state {self.chosen_state.name!r} has no core"
            raise RequestError.of(where, what, NO_CORE_FIX, kind=Refusal.UNSUPPORTED)
        return history

    @property
    def tower(self) -> Tower | None:
        """The rule by which cells leave the tower; None if all stay, as for the resize control.

        Raises :class:`RequestError` for a model that passes all cells through its tower.
        """
        request = self.request
        rule = request.tower
        if rule is None:
            rule = self.served.tower if self.state is None else self.state.tower
        if rule is None or rule == "none":
            return None
        if not request.enabled or request.keep == "resized":
            return None
        if reason := self.served.capabilities.whole_tower:
            what = f"no cell can leave the tower: this model {reason}"
            fix = "leave it out, also of a state"
            where = f"{ENTRY}/tower"
            raise RequestError.of(where, what, fix, kind=Refusal.UNSUPPORTED)
        return rule

    @property
    def prunes_videos(self) -> bool:
        """Whether videos are pruned; if not, they stay as in stock vLLM.

        Raises :class:`RequestError` for a video budget if videos are not pruned.
        """
        state = self.chosen_state
        prunes = self.served.capabilities.prunes_videos and state.frames is not None
        if self.request.video_budget is None or prunes:
            return prunes
        where = f"{ENTRY}/video_budget"
        if not self.served.capabilities.prunes_videos:
            what = "no token of a video can be chosen: this model's are served whole"
            fix = "leave it out"
        else:
            what = f"state {state.name!r} leaves videos whole"
            fix = "leave it out, or ask for a state with frames"
        raise RequestError.of(where, what, fix, kind=Refusal.WHOLE_VIDEO)

    def plan_images(
        self, counts: Sequence[TokenCount], limit: int | None
    ) -> list[ItemPlan]:
        """Plans of the images, which together keep at most ``limit`` tokens.

        K is resolved from an image's N tokens, and lowered to the M encoded tokens if M is less. A
        retired image keeps K_c.
        """
        request = self.request
        if not request.enabled:
            check_unpruned(self.served.rules, [c.tokens for c in counts], limit)
            return [self._make_plan(count, count.tokens) for count in counts]
        # Unsupported positions are refused even where every token is kept.
        self.served.positions_of(self.chosen_state, request.positions)
        field = "" if request.budget is None else "budget"
        return self._plan(counts, self._find_image_budgets(counts), limit, field)

    def plan_videos(
        self, counts: Sequence[TokenCount], limit: int | None
    ) -> list[ItemPlan]:
        """Plans of the videos, which together keep at most ``limit`` tokens."""
        request = self.request
        field = "" if request.enabled else "enabled"
        if request.video_budget is not None:
            field = "video_budget"
        requested = request.video_budget, field or self._state_field
        plans = self._plan(counts, [requested] * len(counts), limit, field)
        for plan in plans:
            if problem := find_cost_problem(plan, self.served.rules.cost):
                fix = f"ask for a state such as vcast, or serve with a higher {FLAG}"
                raise RequestError.of(f"{ENTRY}/state", problem, fix)
        return plans

    @property
    def _state_field(self) -> str:
        return "" if self.state is None else "state"

    def _find_image_budgets(self, counts: Sequence[TokenCount]) -> list[_Requested]:
        """Budget of each image: the request's, or else the operator's for its level of detail."""
        sizes = [count.tokens for count in counts]
        budgets = self.request.split_budget(sizes)
        levels = self.request.details
        if levels is None or len(levels) != len(counts):
            # There are no messages, or their form does not show where the images are.
            levels = [None] * len(counts)
        # Start-up has checked the operator's budgets for details against the range of the rules.
        by_level = self.served.rules.detail.as_dict()
        requested: list[_Requested] = []
        for size, budget, level in zip(sizes, budgets, levels, strict=True):
            detail = by_level.get(level) if level else None
            if budget is not None:
                requested.append((budget, "budget"))
            elif detail is not None:
                requested.append((detail.tokens_kept(size), ""))
            else:
                requested.append((None, self._state_field))
        return requested

    def _plan(
        self,
        counts: Sequence[TokenCount],
        budgets: Sequence[_Requested],
        limit: int | None,
        field: str,
    ) -> list[ItemPlan]:
        """Plans by the requested budgets, lowered where ``limit`` requires it.

        ``field`` is the request field that sets all budgets, or empty if none does.
        """
        history = self.history
        plans = []
        for i, (count, (budget, by_field)) in enumerate(
            zip(counts, budgets, strict=True)
        ):
            resolved = self._resolve(count, budget)
            if by_field:
                self._check_range(count, resolved, by_field)
            if history and not count.frames and i < history.count_retired(len(counts)):
                kept = min(resolved, count.encoded)
                resolved = history.count_core(self.chosen_state, kept)
            plans.append(self._make_plan(count, resolved))
            if not count.frames:
                self.served.find_needs(plans[-1])
        shares = share_tokens(limit, [plan.budget for plan in plans], field)
        if shares is None:
            return plans
        return [
            self._make_plan(count, self._resolve(count, share))
            for count, share in zip(counts, shares, strict=True)
        ]

    def _resolve(self, count: TokenCount, budget: int | BudgetCall | None) -> int:
        """K of an image or video by ``budget``, or by the server's or the state's own if None."""
        if not self.request.enabled:
            return count.tokens
        served = self.served
        if budget is None and count.frames:
            budget = served.video_budget
        elif budget is None and self.state is None:
            budget = served.budget
        exchange = self.request.keep == "state"
        is_video = count.frames > 0
        policy = make_policy(
            self.chosen_state, budget, video=is_video, exchange=exchange
        )
        if not is_video:
            return policy.at(count.tokens, count.tiles).budget
        resolved = served.count_video_tokens(policy, count.tokens, count.frames)
        compares = self.request.keep in ("state", "reference") and (
            policy.refines or policy.base.score is None
        )
        if resolved < count.tokens and count.tokens > _MAX_COMPARED and compares:
            what = f"compares every two of the {count.tokens} tokens of a video, and at most "
            what += f"{_MAX_COMPARED} are allowed"
            fix = "send fewer frames, or ask for a state such as vcast"
            raise RequestError.of(f"{ENTRY}/state", what, fix)
        return resolved

    def _check_range(self, count: TokenCount, budget: int, field: str) -> None:
        """Refuse K of an image or frame that is out of range, as set by the request's ``field``."""
        rules = self.served.rules
        minimum = rules.minimum if self.request.enabled else 1
        if minimum <= -(-budget // max(1, count.frames)) <= rules.maximum:
            return
        limits = f"{minimum} to {rules.maximum}"
        what = f"K = {budget}, and requests may ask for {limits}"
        fix = "ask for a number in the range"
        if count.frames:
            what = f"K = {budget} of {count.frames} frames"
            what += f", and requests may ask for {limits} of each"
        elif field == "budget":
            fix += f", or for a share within it: 1/8:{minimum}-{rules.maximum}"
        where = f"{ENTRY}/{field}"
        raise RequestError.of(where, what, fix, kind=Refusal.OUT_OF_RANGE)

    def _make_plan(self, count: TokenCount, budget: int) -> ItemPlan:
        """Plan of an item that keeps K of its tokens, or all if it has no more than K.

        Of an image of which the tower would leave K or fewer, all cells pass the whole tower.
        """
        tokens = count.encoded
        tower = None
        rule = None if count.frames else self.tower
        if rule is not None and budget < rule.count_cells(tokens) < tokens:
            tower = TowerCut(tokens, rule.depth, rule.criterion)
            tokens = rule.count_cells(tokens)
        return ItemPlan(
            min(budget, tokens),
            NO_KEY,
            keep=self.request.keep,
            state=b"" if self.state is None else encode_state(self.state),
            tokens=tokens,
            frames=count.frames,
            tower=tower,
            positions=self.served.positions_of(
                self.chosen_state, self.request.positions
            ),
        )


def check_unpruned(
    rules: RequestRules, sizes: Sequence[int], limit: int | None
) -> None:
    """Refuse unpruned images of ``sizes`` tokens if one of them, or their sum, is too large.

    The minimum of the rules does not apply, because it bounds how far an image may be cut.
    """
    if (largest := max(sizes, default=0)) > rules.maximum:
        what = f"false keeps all {largest} tokens of an image, and requests may keep "
        what += str(rules.maximum)
        raise RequestError.of(
            f"{ENTRY}/enabled", what, "ask for a budget", kind=Refusal.OUT_OF_RANGE
        )
    share_tokens(limit, sizes, "enabled")


def share_tokens(
    limit: int | None, budgets: Sequence[int], field: str = ""
) -> Sequence[int] | None:
    """Reduced K of each item of a request that would keep more than ``limit``, else None.

    Raises :class:`RequestError` if ``field`` of the request asked for that many tokens, or if there
    are more items than ``limit``.
    """
    total = sum(budgets)
    if limit is None or total <= limit:
        return None
    what = f"{total} tokens of {len(budgets)}, and a request has {limit} for them"
    if field:
        where = f"{ENTRY}/{field}"
        fix = "ask for fewer, or leave it out"
        raise RequestError.of(where, what, fix, kind=Refusal.OUT_OF_RANGE)
    if limit < len(budgets):
        fix = "send fewer images or videos"
        raise RequestError.of("messages", what, fix, kind=Refusal.OUT_OF_RANGE)
    return split_shared_budget(limit, budgets)
