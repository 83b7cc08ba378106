"""Selection that survives any input: plans are replaced, selections judged, policies fall back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from vllm_autoprune.ops.rowwise import upload
from vllm_autoprune.serving.compat.worker import broadcast_rank_zero, world_size
from vllm_autoprune.serving.plan import NO_KEY, Choice, ItemPlan, Key
from vllm_autoprune.serving.plan_rules import PlanRules
from vllm_autoprune.tpdsl.atoms.source import MAX_BUDGET
from vllm_autoprune.tpdsl.base_policy import (
    FALLBACKS,
    Given,
    RefinedTokens,
    TokenSelection,
)
from vllm_autoprune.tpdsl.materialize import PruningPolicy
from vllm_autoprune.tpdsl.refine import (
    assemble_rows,
    keep_indices,
    keep_unmerged,
    select_evenly,
    select_reference,
    select_tokens,
)
from vllm_autoprune.tpdsl.safety import find_unsafe
from vllm_autoprune.tpdsl.tokens import VisualTokens

logger = logging.getLogger("vllm.autoprune")

_FallbackReason = Literal["scores", "error", "plan", "unsafe"]
"""Why an image fell back: its scores were not finite, its policy raised, its plan was refused, or
its selection broke the bounds of its state."""

_FALLBACK_REASONS: tuple[_FallbackReason, ...] = get_args(_FallbackReason)


class FallbackReporter:
    """Counts fallbacks by kind and reason and exceptions by type, and logs the first of each.

    Counting never waits for the device. ``errors`` counts exceptions by the name of their type.
    """

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self._logged: set[tuple[str, _FallbackReason]] = set()
        self._has_lost = False
        self._counts: Tensor | None = None
        self._on_host: Tensor | None = None

    def report(
        self,
        codes: Tensor,
        reason: _FallbackReason = "scores",
        unsafe: Tensor | None = None,
    ) -> None:
        """Count fallback codes ``(B,)``; a later call warns once of each kind and reason.

        The reason of an image is "unsafe" if ``unsafe`` ``(B,)`` is true, and otherwise ``reason``.
        """
        for (kind, why), count in self.counts().items():
            if count and kind != "none" and (kind, why) not in self._logged:
                self._logged.add((kind, why))
                logger.warning(
                    "An image fell back to %s tokens (%s); more are only counted.",
                    kind,
                    why,
                )
        kinds = torch.arange(len(FALLBACKS), device=codes.device)
        shape = len(_FALLBACK_REASONS), len(FALLBACKS)
        added = torch.zeros(*shape, dtype=torch.int64, device=codes.device)
        is_kind = codes[:, None] == kinds
        if unsafe is not None:
            added[_FALLBACK_REASONS.index("unsafe")] = (is_kind & unsafe[:, None]).sum(
                dim=0
            )
            is_kind &= ~unsafe[:, None]
        added[_FALLBACK_REASONS.index(reason)] = is_kind.sum(dim=0)
        self._counts = added if self._counts is None else self._counts + added
        if self._on_host is None:
            pinned = codes.device.type == "cuda"
            self._on_host = torch.zeros(shape, dtype=torch.int64, pin_memory=pinned)
        self._on_host.copy_(self._counts, non_blocking=True)

    def report_image(
        self, kind: str, reason: _FallbackReason, device: torch.device
    ) -> None:
        """Count one image that fell back."""
        code = FALLBACKS.index(kind)
        codes = torch.full((1,), code, dtype=torch.uint8, device=device)
        self.report(codes, reason)

    def counts(self) -> dict[tuple[str, _FallbackReason], int]:
        """Images by fallback kind, including "none", and reason, as far as the host knows."""
        rows = [[0] * len(FALLBACKS)] * len(_FALLBACK_REASONS)
        if self._on_host is not None:
            rows = self._on_host.tolist()
        return {
            (kind, reason): count
            for reason, row in zip(_FALLBACK_REASONS, rows, strict=True)
            for kind, count in zip(FALLBACKS, row, strict=True)
        }

    def report_error(
        self, error: Exception, outcome: str = "keeping its base policy's tokens"
    ) -> None:
        """Count an exception of selection; the first of its type is logged with its traceback."""
        if self._count_error(error) == 1:
            logger.error("Pruning of an image failed; %s.", outcome, exc_info=error)

    def report_lost(self, error: Exception, device: torch.device) -> None:
        """Count an image that got no features; the first is logged with its traceback."""
        self._count_error(error)
        if not self._has_lost:
            self._has_lost = True
            logger.error(
                "An image cannot be encoded, its tokens are zeros.", exc_info=error
            )
        self.report_image("zeros", "error", device)

    def report_refused_plan(self, error: Exception, device: torch.device) -> None:
        """Count a plan that is replaced by another one, and log the first."""
        count = self._count_error(error)
        self.report_image("reference", "plan", device)
        if count == 1:
            logger.error("A plan is not carried out as it came: %s", error)

    def _count_error(self, error: Exception) -> int:
        name = type(error).__name__
        self.errors[name] = self.errors.get(name, 0) + 1
        return self.errors[name]


class PlanReader:
    """Decoder of plans in the worker; no input makes it raise.

    A client may send anything through vLLM's ``/inference/v1/generate``. A malformed plan is
    replaced by the server's own budget with the base policy alone, and settings that a plan may not
    have are removed. Both are counted, and the first is logged.
    """

    def __init__(
        self,
        rules: PlanRules,
        reporter: FallbackReporter,
        device: torch.device,
        longest: int = MAX_BUDGET,
    ) -> None:
        self._rules = rules
        # The largest K of a share may be far above what fits into a prompt.
        self._maximum = min(rules.served.budget.range()[1], longest)
        self._reporter = reporter
        self._device = device

    def read(self, rows: Sequence[object] | Tensor) -> list[ItemPlan]:
        """The plan of every image."""
        return [self._read(row) for row in rows]

    def _read(self, row: object) -> ItemPlan:
        try:
            plan = ItemPlan.decode(row)
        except Exception as error:  # the client may have sent anything  # noqa: BLE001
            self._reporter.report_refused_plan(error, self._device)
            return ItemPlan(self._maximum, NO_KEY, keep="reference", positions="packed")
        try:
            self._rules.check_choice(plan)
        except Exception as error:  # noqa: BLE001
            self._reporter.report_refused_plan(error, self._device)
            unread = tuple(Choice(choice.budget) for choice in plan.earlier)
            text = tuple((index, 0) for index, _ in plan.text)
            plan = replace(
                plan.ask(), earlier=unread, keep="state", state=b"", text=text
            )
        # If the state does not allow the budget, fall back to a control plan. An image that keeps
        # every token may legitimately have such a plan, because nothing is selected then.
        for candidate in (plan, replace(plan, keep="reference")):
            try:
                self._rules.served.policy_for_plan(candidate)
            except Exception:  # a budget error, or any other  # noqa: BLE001
                continue
            return candidate
        return replace_by_draw(plan)


def replace_by_draw(plan: ItemPlan) -> ItemPlan:
    """The plan of a random draw of as many tokens, which comes after no other item."""
    return replace(plan, keep="random", state=b"", part="whole", core=0, earlier=())


@torch.no_grad()
def select_with_fallback(
    policy: PruningPolicy,
    tokens: VisualTokens,
    reporter: FallbackReporter,
    earlier: Given | None = None,
    remembered: Sequence[Tensor | None] = (),
) -> RefinedTokens:
    """Run :func:`vllm_autoprune.refine`; fall back if it raises or breaks the bounds of its state.

    Order of fallbacks: the base policy's selection, then evenly spaced tokens, which read no input.
    With ``earlier`` tokens, K more are selected given those. If tokens ``(P,)`` of an image are
    ``remembered``, it keeps those, in their order, instead of the selected ones. Gradients are off,
    because vLLM warms up on a CPU outside of its inference mode.
    """
    policy = policy.at(tokens.count, tokens.grid.tiles)
    if policy.budget >= tokens.count:
        refined = RefinedTokens.keep_all(tokens)
        reporter.report(refined.fallback)
        return refined
    safe = _select_safely(policy, tokens, reporter, earlier)
    chosen = safe.selection
    reason = safe.reason
    is_remembered = any(indices is not None for indices in remembered)
    if is_remembered:
        indices = _prefer(remembered, chosen.indices).sort(dim=1).values
        chosen = replace(chosen, indices=indices)
    # Outside of any `try`: a rank that raised must take part, or the others would wait forever.
    chosen = _broadcast_selection(chosen, policy.budget)
    try:
        refined = assemble_rows(policy, tokens, chosen)
        if is_remembered:
            order = _prefer(remembered, refined.indices)
            refined = refined.in_order(order, tokens.count)
    except Exception as error:  # the engine must survive any failure of a policy  # noqa: BLE001
        reporter.report_error(error)
        chosen = _keep_base(chosen)
        reason = "error"
        refined = keep_unmerged(tokens, chosen)
    reporter.report(refined.fallback, reason, safe.unsafe)
    return refined


def select_evenly_with_ranks(
    budget: int, tokens: VisualTokens, reporter: FallbackReporter, earlier: Given | None
) -> RefinedTokens:
    """Evenly spaced tokens, for a policy whose inputs could not be made."""
    if budget >= tokens.count:
        refined = RefinedTokens.keep_all(tokens)
    else:
        chosen = _broadcast_selection(select_evenly(budget, tokens, earlier), budget)
        refined = keep_unmerged(tokens, chosen)
    reporter.report(refined.fallback, "error")
    return refined


@dataclass(frozen=True, slots=True)
class _SafeSelection:
    """A selection that is within its bounds, and why it differs from the policy's."""

    selection: TokenSelection
    reason: _FallbackReason = "scores"
    """Why those images fell back that did."""
    unsafe: Tensor | None = None
    """``(B,)`` bool: images whose selection broke the bounds of its state. This is judged on the
    device, image by image: a state that fails at one budget or on one image may be sound at others,
    and no client may change what others get."""


def _select_safely(
    policy: PruningPolicy,
    tokens: VisualTokens,
    reporter: FallbackReporter,
    earlier: Given | None,
) -> _SafeSelection:
    """The policy's selection, or a fallback if it raises or breaks its bounds."""
    try:
        chosen = select_tokens(policy, tokens, earlier)
        unsafe = find_unsafe(policy, tokens, chosen)
        base = _keep_base(chosen)
        indices = torch.where(unsafe[:, None], base.indices, chosen.indices)
        fallback = torch.where(unsafe, base.fallback, chosen.fallback)
        return _SafeSelection(
            replace(chosen, indices=indices, fallback=fallback), unsafe=unsafe
        )
    except Exception as error:  # noqa: BLE001
        reporter.report_error(error)
    # Outside the handlers, because an exception keeps alive what the policy has allocated.
    try:
        return _SafeSelection(select_reference(policy, tokens, earlier), "error")
    except Exception as error:  # noqa: BLE001
        reporter.report_error(error)
    return _SafeSelection(select_evenly(policy.budget, tokens, earlier), "error")


def _keep_base(chosen: TokenSelection) -> TokenSelection:
    """The base policy's tokens instead of the selected ones; evenly spaced tokens stay."""
    indices = chosen.reference.picks.sort(dim=1).values
    return replace(chosen, indices=indices, fallback=chosen.fallback.clamp_min(1))


def _prefer(remembered: Sequence[Tensor | None], indices: Tensor) -> Tensor:
    """Indices ``(B, P)``, replaced by an image's remembered ones if there are as many."""
    rows = [
        row if preferred is None or len(preferred) != len(row) else preferred
        for row, preferred in zip(indices.unbind(), remembered, strict=True)
    ]
    return torch.stack(rows)


def select_at_random(
    budget: int, tokens: VisualTokens, keys: Sequence[Key], start: int = 0
) -> RefinedTokens:
    """Draw K random tokens per image, seeded by its pixels' key: a control, not a policy.

    Earlier items of the image have drawn ``start`` tokens, and the next K are kept. The draw
    depends on nothing else, so it is the same on every rank, in every batch and under every name of
    the image.
    """
    picks = []
    for high, _ in keys:
        generator = torch.Generator().manual_seed(high & 0x7FFF_FFFF_FFFF_FFFF)
        order = torch.randperm(tokens.count, generator=generator)
        picks.append(order[start : start + budget])
    return keep_indices(tokens, upload(torch.stack(picks), tokens.features.device))


def _broadcast_selection(chosen: TokenSelection, budget: int) -> TokenSelection:
    """Broadcast rank 0's selection to all tensor-parallel ranks.

    Inputs are bit-equal on all ranks and so are the selections. But ranks that disagreed would
    serve garbage without any error, and K indices are little to send. Every rank sends K of them,
    whatever it has fallen back to: a base policy with extra rows has fewer indices than K.
    """
    if world_size() == 1:
        return chosen
    count = chosen.indices.shape[1]
    last = chosen.indices[:, -1:].expand(-1, budget - count)
    codes = chosen.fallback[:, None].to(torch.int64)
    packed = broadcast_rank_zero(torch.cat([codes, chosen.indices, last], dim=1))
    indices = packed[:, 1 : count + 1].contiguous()
    fallback = packed[:, 0].to(torch.uint8)
    return replace(chosen, indices=indices, fallback=fallback)
