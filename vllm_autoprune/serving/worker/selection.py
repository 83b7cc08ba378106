"""Selection that nothing stops: plans are replaced, states checked, policies fall back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from cachetools import LRUCache
from torch import Tensor

from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.ops.rowwise import upload
from vllm_autoprune.serving.compat.worker import world_size
from vllm_autoprune.serving.plan import NO_KEY, Choice, ItemPlan, Key
from vllm_autoprune.serving.served_state import PlanRules
from vllm_autoprune.tpdsl.atoms.source import MAX_BUDGET
from vllm_autoprune.tpdsl.base_policy import FALLBACKS, Given, RefinedTokens, TokenSelection
from vllm_autoprune.tpdsl.materialize import PruningPolicy
from vllm_autoprune.tpdsl.refine import (
    assemble_rows,
    keep_evenly,
    keep_indices,
    keep_reference,
    select_tokens,
)
from vllm_autoprune.tpdsl.safety import safety_check
from vllm_autoprune.tpdsl.tokens import VisualTokens

logger = logging.getLogger("vllm.autoprune")

_FallbackReason = Literal["scores", "error", "plan"]
"""Why an image fell back: its scores were not finite, its policy raised, or its plan was refused.
"""

_FALLBACK_REASONS: tuple[_FallbackReason, ...] = get_args(_FallbackReason)


class FallbackReporter:
    """Counts fallbacks by kind and reason and exceptions by type, and logs the first of each.

    Counting never waits for the device. ``errors`` are exceptions by the name of their type.
    """

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self._logged = {"none"}
        self._counts: Tensor | None = None
        self._on_host: Tensor | None = None

    def report(self, codes: Tensor, reason: _FallbackReason = "scores") -> None:
        """Count fallback codes ``(B,)``; logs the totals of the previous call."""
        for (kind, _), count in self.counts().items():
            if count and kind not in self._logged:
                self._logged.add(kind)
                logger.warning("An image fell back to %s tokens; more are only counted.", kind)
        kinds = torch.arange(len(FALLBACKS), device=codes.device)
        shape = len(_FALLBACK_REASONS), len(FALLBACKS)
        added = torch.zeros(*shape, dtype=torch.int64, device=codes.device)
        added[_FALLBACK_REASONS.index(reason)] = (codes[:, None] == kinds).sum(dim=0)
        self._counts = added if self._counts is None else self._counts + added
        if self._on_host is None:
            pinned = codes.device.type == "cuda"
            self._on_host = torch.zeros(shape, dtype=torch.int64, pin_memory=pinned)
        self._on_host.copy_(self._counts, non_blocking=True)

    def counts(self) -> dict[tuple[str, _FallbackReason], int]:
        """Images by fallback kind, "none" among them, and reason, as far as the host knows."""
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

    def report_refused_plan(self, error: Exception, device: torch.device) -> None:
        """Count a plan that is replaced by another one, and log the first."""
        count = self._count_error(error)
        self.report(torch.ones(1, dtype=torch.uint8, device=device), "plan")
        if count == 1:
            logger.error("A plan is not carried out as it came: %s", error)

    def _count_error(self, error: Exception) -> int:
        name = type(error).__name__
        self.errors[name] = self.errors.get(name, 0) + 1
        return self.errors[name]


class PlanReader:
    """Decoder of plans in the worker; no input makes it raise.

    A client may send anything through vLLM's ``/inference/v1/generate``. A malformed plan becomes
    the server's own budget with the base policy alone; settings that a plan may not have are
    removed. Both are counted, and the first is logged.
    """

    def __init__(
        self,
        rules: PlanRules,
        reporter: FallbackReporter,
        device: torch.device,
        longest: int = MAX_BUDGET,
    ) -> None:
        self._rules = rules
        # Of a share the largest K may be far above what fits into a prompt.
        self._most = min(rules.served.budget.range()[1], longest)
        self._reporter = reporter
        self._device = device

    def read(self, rows: Sequence[object] | Tensor) -> list[ItemPlan]:
        """The plan of every image."""
        return [self._read(row) for row in rows]

    def _read(self, row: object) -> ItemPlan:
        try:
            plan = ItemPlan.decode(row)
        except Exception as error:  # the client may have sent anything
            self._reporter.report_refused_plan(error, self._device)
            return ItemPlan(self._most, NO_KEY, keep="reference")
        try:
            self._rules.check_choice(plan)
        except AutopruneError as error:
            self._reporter.report_refused_plan(error, self._device)
            unread = tuple(Choice(choice.budget) for choice in plan.earlier)
            text = tuple((before, 0) for before, _ in plan.text)
            plan = replace(plan.ask(), earlier=unread, keep="state", state=b"", text=text)
        # A control plan where the state does not allow the budget. An image that keeps every token
        # may have such a plan, because nothing is selected then.
        for candidate in (plan, replace(plan, keep="reference")):
            try:
                self._rules.served.policy_for_plan(candidate)
            except AutopruneError:
                continue
            return candidate
        return replace(plan, keep="random", state=b"", part="whole", core=0, earlier=())


_MAX_VERDICTS = 4096
"""Verdicts that are cached, the least recently used dropped first."""

_VerdictKey = tuple[str, int, int, int, int]
"""State digest, K, q_e and r_min on these images, and their number of tiles."""


class FirstImageCheck:
    """Checks a state on the first images that it selects from, at each budget and tile count.

    Start-up has only synthetic ones. A state that fails at K = 1 may be valid at K = 64, and the
    budget of one client must not change the results of others. ``unsafe`` counts the states that
    failed at any budget; where they did, their base policy serves.
    """

    def __init__(self) -> None:
        self.unsafe = 0
        self._safe: LRUCache[_VerdictKey, bool] = LRUCache(_MAX_VERDICTS)

    def replace_unsafe(self, policy: PruningPolicy, tokens: VisualTokens) -> PruningPolicy:
        """The policy itself, or its base policy alone where its state has failed."""
        state, tiles = policy.state, tokens.grid.tiles
        here = policy.at(tokens.count, tiles)
        key = (state.digest, here.budget, here.quota, here.r_min, tiles)
        safe = self._safe.get(key)
        if safe is None:
            safe = self._check(policy, tokens, here.budget)
            if safe is not None:
                self._safe[key] = safe
        if safe is not False:
            return policy
        return replace(
            policy, state=state.without_exchange(), quota=0, r_min=policy.budget, by_size=None
        )

    def _check(self, policy: PruningPolicy, tokens: VisualTokens, budget: int) -> bool | None:
        """Whether the state is safe; None where these images cannot tell."""
        record = safety_check(policy, [tokens])
        valid = record.valid
        if world_size() > 1:  # ranks that disagreed would serve different tokens
            verdict = torch.tensor([int(valid)], device=tokens.features.device)
            valid = bool(_broadcast_rank_zero(verdict).item())
        if valid:
            return True
        ranked = policy.state.ranked(tokens).features
        if not bool(tokens.features.isfinite().all() & ranked.isfinite().all()):
            return None  # no policy passes on non-finite features
        digest = policy.state.digest
        if any(other[0] == digest and not safe for other, safe in self._safe.items()):
            return False  # logged once: clients choose budgets, and could fill the log with them
        self.unsafe += 1
        logger.error(
            "State %r (%s) FAILS ITS SAFETY CHECK ON THE FIRST REAL IMAGE, at K = %d: %s. At this "
            "budget, and any other at which it fails, its base policy %s serves alone.",
            policy.state.name,
            digest[:12],
            budget,
            "; ".join(f"{v.name}: {v.detail}" for v in record.failures()) or "on rank 0",
            policy.base.name,
        )
        return False


@torch.no_grad()
def select_with_fallback(
    policy: PruningPolicy,
    tokens: VisualTokens,
    reporter: FallbackReporter,
    earlier: Given | None = None,
    known: Sequence[Tensor | None] = (),
) -> RefinedTokens:
    """Run :func:`vllm_autoprune.refine`; after an exception fall back instead of raising.

    Order: the policy, its base policy's selection, evenly spaced tokens, which read no input. With
    ``given`` tokens, the selection is the delta beside them. An image keeps the tokens ``(P,)``
    that are ``known`` of it, in their order, in place of those selected. Without derivatives,
    because vLLM warms up on a CPU outside of its inference mode.
    """
    policy = policy.at(tokens.count, tokens.grid.tiles)
    any_known = any(indices is not None for indices in known)
    reason: _FallbackReason = "scores"
    try:
        if policy.budget >= tokens.count:
            refined = RefinedTokens.keep_all(tokens)
        else:
            chosen = select_tokens(policy, tokens, earlier)
            if any_known:
                chosen = replace(chosen, indices=_prefer(known, chosen.indices).sort(dim=1).values)
            refined = assemble_rows(policy, tokens, _broadcast_selection(chosen))
            if any_known:
                refined = refined.in_order(_prefer(known, refined.indices), tokens.count)
    except Exception as error:  # the engine must survive any failure of a policy
        reporter.report_error(error)
        reason = "error"
        try:
            refined = keep_reference(policy, tokens, earlier)
        except Exception as second:
            reporter.report_error(second)
            refined = keep_evenly(policy.budget, tokens, earlier)
    reporter.report(refined.fallback, reason)
    return refined


def _prefer(known: Sequence[Tensor | None], indices: Tensor) -> Tensor:
    """Indices ``(B, P)`` with those of images of which as many are known replaced by them."""
    rows = zip(indices.unbind(), known, strict=True)
    return torch.stack([a if b is None or len(b) != len(a) else b for a, b in rows])


def select_at_random(
    budget: int, tokens: VisualTokens, keys: Sequence[Key], before: int = 0
) -> RefinedTokens:
    """Draw K random tokens an image, seeded by its pixels' key: a control, not a policy.

    ``before`` tokens were drawn by earlier items of the image, and the next ones are kept.

    The draw depends on nothing else, so it is the same on every rank, in every batch and under
    every name of the image.
    """
    picks = []
    for high, _ in keys:
        generator = torch.Generator().manual_seed(high & 0x7FFF_FFFF_FFFF_FFFF)
        picks.append(torch.randperm(tokens.count, generator=generator)[before : before + budget])
    return keep_indices(tokens, upload(torch.stack(picks), tokens.features.device))


def _broadcast_rank_zero(tensor: Tensor) -> Tensor:
    """Broadcast rank 0's tensor to every tensor-parallel rank."""
    from vllm.distributed import get_tp_group

    broadcast: Tensor = get_tp_group().broadcast(tensor, src=0)
    return broadcast


def _broadcast_selection(chosen: TokenSelection) -> TokenSelection:
    """Broadcast rank 0's selection to all tensor-parallel ranks.

    Inputs are bit-equal on all ranks and so are the selections; but ranks that disagreed would
    serve garbage without any error, and K indices are little to send.
    """
    if world_size() == 1:
        return chosen
    packed = torch.cat([chosen.indices, chosen.fallback[:, None].to(torch.int64)], dim=1)
    packed = _broadcast_rank_zero(packed)
    indices, fallback = packed[:, :-1].contiguous(), packed[:, -1].to(torch.uint8)
    return replace(chosen, indices=indices, fallback=fallback)
