"""Schedule of requests: an open loop at a rate, or a closed loop of users; and their objective."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from benchmarks.common import BenchmarkError, StrictModel
from benchmarks.common.client import Phase, Record

OPEN_RAMP = 0.05
"""Share of an open loop's requests that do not count: the first meet an emptier server."""


class Load(StrictModel):
    """Exactly one of ``rate`` (requests a second, open loop) and ``users`` (closed loop)."""

    rate: float | None = None
    burstiness: float = Field(default=1.0, gt=0)
    users: int | None = Field(default=None, ge=1)
    seed: int = 0

    @model_validator(mode="after")
    def _one_of_two(self) -> Load:
        if (self.rate is None) == (self.users is None):
            raise ValueError("give a rate (open loop) or a number of users (closed loop)")
        return self

    @property
    def label(self) -> str:
        """Short, unique, fit for a file name."""
        return f"rate-{self.rate:g}" if self.rate is not None else f"users-{self.users}"

    @property
    def title(self) -> str:
        """Short, for the rows of a table."""
        if self.rate is not None:
            return "1 request/s" if self.rate == 1 else f"{self.rate:g} requests/s"
        return "1 user" if self.users == 1 else f"{self.users} users"

    def describe(self) -> str:
        """In words."""
        if self.rate is None:
            return f"closed loop, {self.title}"
        kind = "Poisson" if self.burstiness == 1 else f"gamma({self.burstiness:g})"
        return f"open loop, {kind} arrivals at {self.title}"

    def due(self, count: int) -> list[float]:
        """When each of ``count`` requests is due, seconds; 0 in a closed loop."""
        if self.rate is None:
            return [0.0] * count
        ramp = self.phases(count).count("ramp")
        arrivals = draw_arrivals(count, self.rate, self.burstiness, self.seed, ramp)
        return [float(at) for at in arrivals]

    def phases(self, count: int) -> list[Phase]:
        """Which of ``count`` requests count, by their place in the schedule.

        The first requests meet an emptier server, and in a closed loop the last ones too, because
        some users have already finished. Where too few would be left, all count.
        """
        ramp = round(OPEN_RAMP * count) if self.users is None else self.users
        drain = 0 if self.users is None else self.users
        if ramp + drain > count // 2:
            ramp = drain = 0
        spans: tuple[tuple[Phase, int], ...] = (
            ("ramp", ramp), ("measured", count - ramp - drain), ("drain", drain),
        )  # fmt: skip
        return [phase for phase, length in spans for _ in range(length)]


class Slo(StrictModel):
    """Service-level objective: the highest latencies of a good request, seconds; None: any."""

    ttft: float | None = Field(default=1.0, gt=0)
    tpot: float | None = Field(default=None, gt=0)
    e2e: float | None = Field(default=None, gt=0)

    def good(self, record: Record) -> bool:
        """Whether a request met every limit; one that failed met none."""
        if not record.ok:
            return False
        pairs = ((record.ttft, self.ttft), (record.tpot, self.tpot), (record.e2e, self.e2e))
        return all(value is None or limit is None or value <= limit for value, limit in pairs)

    def describe(self) -> str:
        """In words, milliseconds."""
        limits = {"TTFT": self.ttft, "TPOT": self.tpot, "E2E": self.e2e}
        described = [f"{k} at most {1000 * v:g} ms" for k, v in limits.items() if v is not None]
        return ", ".join(described) or "none declared"


def draw_arrivals(
    count: int, rate: float, burstiness: float = 1.0, seed: int = 0, ramp: int = 0
) -> NDArray[np.float64]:
    """Seconds from the start at which each request is due, (count,), rising.

    Gaps are gamma distributed with mean 1 / ``rate`` seconds and shape ``burstiness``: 1 is a
    Poisson process, less is burstier, more is more regular (as ``vllm bench serve`` counts it).
    They are scaled so that the requests after the first ``ramp`` come at exactly ``rate``, and so
    do those up to there: the mean of a few hundred random gaps would be several per cent off.
    The same seed gives the same pattern at every rate, only faster or slower, so that the points
    of a sweep differ in nothing else. Raises :class:`BenchmarkError` for an empty schedule.
    """
    problems = [
        f"{name} is {value:g}, which has to be above 0"
        for name, value in (("requests", count), ("rate", rate), ("burstiness", burstiness))
        if not value > 0
    ]
    if problems:
        raise BenchmarkError(f"schedule is empty or has no end: {'; '.join(problems)}")
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / burstiness, size=count)
    # The gap before the first measured request belongs to the ramp.
    for part in (gaps[: ramp + 1], gaps[ramp + 1 :]):
        # A very bursty draw may be all zeros: such gaps stay as they are.
        part *= len(part) / (part.sum() or 1.0)
    return np.asarray(np.cumsum(gaps) / rate, dtype=np.float64)
