"""Safety check of a served state on its first real images; start-up has only synthetic ones."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace

import torch

from vllm_autoprune.serving.worker.tensor_parallel import broadcast_rank_zero, world_size
from vllm_autoprune.tpdsl.materialize import PruningPolicy
from vllm_autoprune.tpdsl.safety import safety_check
from vllm_autoprune.tpdsl.tokens import VisualTokens

logger = logging.getLogger("vllm.autoprune")

MAX_VERDICTS = 4096
"""Verdicts that are cached, the least recently used dropped first."""

VerdictKey = tuple[str, int, int, int, int]
"""State digest, K, q_e and r_min on these images, and their number of tiles."""


class FirstImageCheck:
    """Checks a state on the first images that it selects from, at each budget and tile count.

    A state that fails at K = 1 may be valid at K = 64, and the budget of one client must not change
    the results of others. ``unsafe`` counts the states that failed at any budget;
    where they did, their base policy serves.
    """

    def __init__(self) -> None:
        self.unsafe = 0
        self._safe: OrderedDict[VerdictKey, bool] = OrderedDict()

    def replace_unsafe(self, policy: PruningPolicy, tokens: VisualTokens) -> PruningPolicy:
        """The policy itself, or its base policy alone where its state has failed."""
        state, tiles = policy.state, tokens.grid.tiles
        here = policy.at(tokens.count, tiles)
        key = (state.digest, here.budget, here.quota, here.r_min, tiles)
        if key not in self._safe:
            safe = self._check(policy, tokens)
            if safe is None:
                return policy
            self._safe[key] = safe
            while len(self._safe) > MAX_VERDICTS:
                self._safe.popitem(last=False)
        self._safe.move_to_end(key)
        if self._safe[key]:
            return policy
        return replace(
            policy, state=state.without_exchange(), quota=0, r_min=policy.budget, varies=False
        )

    def _check(self, policy: PruningPolicy, tokens: VisualTokens) -> bool | None:
        """Whether the state is safe; None where these images cannot tell."""
        record = safety_check(policy, [tokens])
        if _verdict_of_rank_zero(record.valid, tokens.features.device):
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
            policy.at(tokens.count, tokens.grid.tiles).budget,
            "; ".join(f"{v.name}: {v.detail}" for v in record.failures()) or "on rank 0",
            policy.base.name,
        )
        return False


def _verdict_of_rank_zero(valid: bool, device: torch.device) -> bool:
    """Rank 0's verdict: ranks that disagreed would serve different tokens."""
    if world_size() == 1:
        return valid
    verdict = broadcast_rank_zero(torch.tensor([int(valid)], device=device))
    return bool(verdict.item())
