"""A state's first real image: whether it keeps its promises on what it was made for.

Knows nothing about where images come from. The safety check at start-up has only synthetic ones.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace

import torch

from vllm_autoprune.serving.ranks import as_rank_zero, ranks
from vllm_autoprune.tpdsl.executor.check import safety_check
from vllm_autoprune.tpdsl.executor.materialize import PruningPolicy
from vllm_autoprune.tpdsl.tokens import VisualTokens

logger = logging.getLogger("vllm.autoprune")

KNOWN = 4096
"""States whose verdict is remembered, the oldest forgotten first."""


class FirstImages:
    """Looks at every state once, on the first images that it is to select from.

    ``unsafe`` counts the states that failed; from then on their base policy serves.
    """

    def __init__(self) -> None:
        self.unsafe = 0
        self._safe: OrderedDict[str, bool] = OrderedDict()

    def vetted(self, policy: PruningPolicy, tokens: VisualTokens) -> PruningPolicy:
        """The policy itself, or its base policy alone where its state has failed."""
        state = policy.state
        if state.digest not in self._safe:
            found = self._look(policy, tokens)
            if found is None:
                return policy
            self._safe[state.digest] = found
            while len(self._safe) > KNOWN:
                self._safe.popitem(last=False)
        if self._safe[state.digest]:
            return policy
        return replace(
            policy, state=state.without_exchange(), quota=0, r_min=policy.budget, varies=False
        )

    def _look(self, policy: PruningPolicy, tokens: VisualTokens) -> bool | None:
        """Whether the state is safe; None where these images cannot tell."""
        record = safety_check(policy, [tokens])
        if _everywhere(record.valid, tokens.features.device):
            return True
        if not bool(tokens.features.isfinite().all()):
            return None  # no policy could have kept its promises on these
        self.unsafe += 1
        logger.error(
            "State %r (%s) FAILS ITS SAFETY CHECK ON THE FIRST REAL IMAGE: %s. From now on its "
            "base policy %s serves alone.",
            policy.state.name,
            policy.state.digest[:12],
            "; ".join(f"{v.name}: {v.detail}" for v in record.failures()) or "on rank 0",
            policy.base.name,
        )
        return False


def _everywhere(valid: bool, device: torch.device) -> bool:
    """Rank 0's verdict: ranks that disagreed would serve different tokens."""
    if ranks() == 1:
        return valid
    told = as_rank_zero(torch.tensor([int(valid)], device=device))
    return bool(told.item())
