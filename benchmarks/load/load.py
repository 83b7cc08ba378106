"""How requests are sent: an open loop at a rate, or a closed loop of N users; and what is good.

Knows nothing about what is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, model_validator

from benchmarks.load.arrivals import arrivals
from benchmarks.load.plain import Plain
from benchmarks.load.record import Phase, Record

OPEN_RAMP = 0.05
"""Share of an open loop's requests that find an emptier server than the rest and do not count."""


class Load(Plain):
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

    def spoken(self) -> str:
        """In words."""
        if self.rate is None:
            return f"closed loop, {self.users} users"
        kind = "Poisson" if self.burstiness == 1 else f"gamma({self.burstiness:g})"
        return f"open loop, {kind} arrivals at {self.rate:g} requests/s"

    def due(self, count: int) -> list[float]:
        """When each of ``count`` requests is due, seconds; a closed loop knows no such times."""
        if self.rate is None:
            return [0.0] * count
        return [float(at) for at in arrivals(count, self.rate, self.burstiness, self.seed)]

    def phases(self, count: int) -> list[Phase]:
        """Which of ``count`` requests count, by their place in the schedule.

        The first find an emptier server. In a closed loop the last do too: users who find nothing
        more to ask leave the others with less company. Where all would be left out, all count.
        """
        ramp = round(OPEN_RAMP * count) if self.users is None else self.users
        drain = 0 if self.users is None else self.users
        if ramp + drain > count // 2:
            ramp = drain = 0
        spans: tuple[tuple[Phase, int], ...] = (
            ("ramp", ramp), ("measured", count - ramp - drain), ("drain", drain),
        )  # fmt: skip
        return [phase for phase, length in spans for _ in range(length)]


class Slo(Plain):
    """What a request must not exceed, seconds; None where nothing is promised."""

    ttft: float | None = Field(default=1.0, gt=0)
    tpot: float | None = Field(default=None, gt=0)
    e2e: float | None = Field(default=None, gt=0)

    def good(self, record: Record) -> bool:
        """Whether a request kept every promise; one that failed kept none."""
        if not record.ok:
            return False
        pairs = ((record.ttft, self.ttft), (record.tpot, self.tpot), (record.e2e, self.e2e))
        return all(value is None or bound is None or value <= bound for value, bound in pairs)

    def spoken(self) -> str:
        """In words, milliseconds."""
        named: Sequence[tuple[str, float | None]] = (
            ("TTFT", self.ttft), ("TPOT", self.tpot), ("E2E", self.e2e),
        )  # fmt: skip
        told = [f"{name} at most {1000 * bound:g} ms" for name, bound in named if bound is not None]
        return ", ".join(told) or "none declared"
