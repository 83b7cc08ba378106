"""Counters of images whose selection fell back, and the log message for the first of each kind."""

from __future__ import annotations

import logging
from typing import Literal, get_args

import torch
from torch import Tensor

from vllm_autoprune.tpdsl.base_policy import FALLBACKS

logger = logging.getLogger("vllm.autoprune")

FallbackReason = Literal["scores", "error", "plan"]
"""Why an image fell back: its scores were not finite, its policy raised, or its plan was refused.
"""

FALLBACK_REASONS: tuple[FallbackReason, ...] = get_args(FallbackReason)


class FallbackMeter:
    """Fallbacks by kind and reason, and exceptions by type; counting never waits for the device."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        """Exceptions by the name of their type."""
        self._counts: Tensor | None = None
        self._on_host: Tensor | None = None

    def add(self, codes: Tensor, reason: FallbackReason = "scores") -> None:
        """Count fallback codes ``(B,)``, and start copying the totals to the host."""
        kinds = torch.arange(len(FALLBACKS), device=codes.device)
        added = torch.zeros(
            len(FALLBACK_REASONS), len(FALLBACKS), dtype=torch.int64, device=codes.device
        )
        added[FALLBACK_REASONS.index(reason)] = (codes[:, None] == kinds).sum(dim=0)
        self._counts = added if self._counts is None else self._counts + added
        if self._on_host is None:
            pinned = codes.device.type == "cuda"
            self._on_host = torch.zeros(added.shape, dtype=torch.int64, pin_memory=pinned)
        self._on_host.copy_(self._counts, non_blocking=True)

    def add_error(self, error: Exception) -> int:
        """Count an exception; returns how many of its type there were, this one included."""
        name = type(error).__name__
        self.errors[name] = self.errors.get(name, 0) + 1
        return self.errors[name]

    def counts(self) -> dict[str, int]:
        """Images by fallback kind so far; waits for the device, so not for the hot path."""
        totals = [0] * len(FALLBACKS)
        if self._counts is not None:
            totals = self._counts.sum(dim=0).tolist()
        return dict(zip(FALLBACKS, totals, strict=True))

    def counts_on_host(self) -> dict[tuple[str, FallbackReason], int]:
        """Images that fell back, by kind and reason, from the copies that have reached the host."""
        rows = [[0] * len(FALLBACKS)] * len(FALLBACK_REASONS)
        if self._on_host is not None:
            rows = self._on_host.tolist()
        return {
            (kind, reason): count
            for reason, row in zip(FALLBACK_REASONS, rows, strict=True)
            for kind, count in zip(FALLBACKS[1:], row[1:], strict=True)
        }


class FallbackReporter:
    """Counts fallbacks and exceptions in ``meter``, and logs the first of each kind."""

    def __init__(self) -> None:
        self.meter = FallbackMeter()
        self._logged: set[str] = set()

    def report(self, codes: Tensor, reason: FallbackReason = "scores") -> None:
        """Count fallback codes ``(B,)``; logs the totals of the previous call."""
        for (kind, _), count in self.meter.counts_on_host().items():
            if count and kind not in self._logged:
                self._logged.add(kind)
                logger.warning("An image fell back to %s tokens; more are only counted.", kind)
        self.meter.add(codes, reason)

    def report_error(
        self, error: Exception, outcome: str = "keeping its base policy's tokens"
    ) -> None:
        """Count an exception of selection; the first of its type is logged with its traceback."""
        if self.meter.add_error(error) == 1:
            logger.error("Pruning of an image failed; %s.", outcome, exc_info=error)

    def report_refused_plan(self, error: Exception, device: torch.device) -> None:
        """Count a plan that is replaced by another one, and log the first."""
        count = self.meter.add_error(error)
        self.report(torch.ones(1, dtype=torch.uint8, device=device), "plan")
        if count == 1:
            logger.error("A plan is not carried out as it came: %s", error)
