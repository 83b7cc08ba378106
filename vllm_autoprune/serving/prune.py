"""Pruning at run time: a policy over a batch, that can fail but never stops the engine.

Knows nothing about models or requests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from vllm_autoprune.serving.first_images import FirstImages
from vllm_autoprune.serving.plan import Key
from vllm_autoprune.serving.ranks import as_rank_zero, ranks
from vllm_autoprune.tpdsl.executor.materialize import PruningPolicy
from vllm_autoprune.tpdsl.executor.refine import (
    assemble_rows,
    keep_all,
    keep_evenly,
    keep_indices,
    keep_reference,
    select_tokens,
)
from vllm_autoprune.tpdsl.outcome import FALLBACKS, RefinedTokens, TokenSelection
from vllm_autoprune.tpdsl.tokens import VisualTokens

logger = logging.getLogger("vllm.autoprune")


Reason = Literal["scores", "error", "plan"]
"""Why an image fell back: its scores were not finite, its policy raised, or its plan was refused.
"""

REASONS: tuple[Reason, ...] = get_args(Reason)


class FallbackMeter:
    """Counts fallbacks by reason and tells of each kind once; never waits for the device.

    ``first`` looks at each state's first real image, where a server wants that.
    """

    def __init__(self, first: FirstImages | None = None) -> None:
        self.first = first
        self.raised: dict[str, int] = {}
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None
        self._told: set[str] = set()

    def add(self, codes: Tensor, reason: Reason = "scores") -> None:
        """Count fallback codes ``(B,)``; the host looks at the counts of the call before."""
        kinds = torch.arange(len(FALLBACKS), device=codes.device)
        found = torch.zeros(len(REASONS), len(FALLBACKS), dtype=torch.int64, device=codes.device)
        found[REASONS.index(reason)] = (codes[:, None] == kinds).sum(dim=0)
        self._counts = found if self._counts is None else self._counts + found
        if self._seen is not None:
            self._tell(self._seen.sum(dim=0).tolist())
        if self._seen is None:
            pinned = codes.device.type == "cuda"
            self._seen = torch.zeros(found.shape, dtype=torch.int64, pin_memory=pinned)
        self._seen.copy_(self._counts, non_blocking=True)

    def error(self, error: Exception, outcome: str = "keeping its base policy's tokens") -> None:
        """Count an exception of the policy, and log the first of its type with its traceback."""
        name = type(error).__name__
        self.raised[name] = self.raised.get(name, 0) + 1
        if self.raised[name] == 1:
            logger.error("Pruning of an image failed; %s.", outcome, exc_info=error)

    def refused(self, error: Exception, device: torch.device) -> None:
        """Count a plan that is not carried out as it came, and log the first."""
        name = type(error).__name__
        self.raised[name] = self.raised.get(name, 0) + 1
        self.add(torch.ones(1, dtype=torch.uint8, device=device), "plan")
        if self.raised[name] == 1:
            logger.error("A plan is not carried out as it came: %s", error)

    def counts(self) -> dict[str, int]:
        """Images by fallback kind so far; waits for the device, so not for the hot path."""
        seen = [0] * len(FALLBACKS) if self._counts is None else self._counts.sum(dim=0).tolist()
        return dict(zip(FALLBACKS, seen, strict=True))

    def seen(self) -> dict[tuple[str, Reason], int]:
        """Images that fell back, by kind and reason, as far as the device has told the host."""
        rows = [[0] * len(FALLBACKS)] * len(REASONS) if self._seen is None else self._seen.tolist()
        return {
            (kind, reason): count
            for reason, row in zip(REASONS, rows, strict=True)
            for kind, count in zip(FALLBACKS[1:], row[1:], strict=True)
        }

    def _tell(self, seen: list[int]) -> None:
        for kind, count in zip(FALLBACKS[1:], seen[1:], strict=True):
            if count and kind not in self._told:
                self._told.add(kind)
                logger.warning("An image fell back to %s tokens; more are only counted.", kind)


@torch.no_grad()
def prune(policy: PruningPolicy, tokens: VisualTokens, meter: FallbackMeter) -> RefinedTokens:
    """As :func:`vllm_autoprune.refine`, but an exception costs quality instead of the engine.

    The policy, then its base policy's selection, then an even spread: the last reads nothing.
    Without derivatives, because vLLM warms up on a CPU outside of its inference mode.
    """
    policy = policy.at(tokens.count, tokens.grid.tiles)
    reason: Reason = "scores"
    try:
        if policy.budget >= tokens.count:
            refined = keep_all(tokens)
        else:
            refined = assemble_rows(policy, tokens, _agreed(select_tokens(policy, tokens)))
    except Exception as error:  # whatever a policy does, the engine has to live
        meter.error(error)
        reason = "error"
        try:
            refined = keep_reference(policy, tokens)
        except Exception as second:
            meter.error(second)
            refined = keep_evenly(policy.budget, tokens)
    meter.add(refined.fallback, reason)
    return refined


def keep_at_random(budget: int, tokens: VisualTokens, keys: Sequence[Key]) -> RefinedTokens:
    """K random tokens an image, drawn from its pixels' key: a control, not a policy.

    The draw depends on nothing else, so it is the same on every rank, in every batch and under
    every name of the image.
    """
    picks = []
    for high, _ in keys:
        generator = torch.Generator().manual_seed(high & 0x7FFF_FFFF_FFFF_FFFF)
        picks.append(torch.randperm(tokens.count, generator=generator)[:budget])
    return keep_indices(tokens, torch.stack(picks).to(tokens.features.device))


def _agreed(chosen: TokenSelection) -> TokenSelection:
    """All tensor-parallel ranks keep what rank 0 keeps.

    Inputs are bit-equal on all ranks and so are the choices; but ranks that disagreed would
    serve garbage without any error, and K indices are little to send.
    """
    if ranks() == 1:
        return chosen
    told = torch.cat([chosen.indices, chosen.fallback[:, None].to(torch.int64)], dim=1)
    told = as_rank_zero(told)
    indices, fallback = told[:, :-1].contiguous(), told[:, -1].to(torch.uint8)
    return replace(chosen, indices=indices, fallback=fallback)
