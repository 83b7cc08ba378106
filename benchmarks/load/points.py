"""One arm at one load, over all passes: records pooled, figures from all of them.

Knows nothing about the order in which passes were made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.load.load import Load
from benchmarks.load.record import Record
from benchmarks.load.result import Result
from benchmarks.load.statistics import Distribution, Estimate, distribution, share

Values = Callable[[Record], Sequence[float]]
"""What one answered request contributes."""


def ttft(record: Record) -> Sequence[float]:
    """Seconds to the first text."""
    return (record.ttft,)


def e2e(record: Record) -> Sequence[float]:
    """Seconds to the last text."""
    return (record.e2e,)


def tpot(record: Record) -> Sequence[float]:
    """Seconds a token after the first."""
    return () if record.tpot is None else (record.tpot,)


def itl(record: Record) -> Sequence[float]:
    """Seconds between deltas."""
    return record.gaps


@dataclass(frozen=True)
class Run:
    """One pass of one arm at one load."""

    arm: str
    number: int
    result: Result
    records: tuple[Record, ...]
    folder: str
    """Relative to the report."""

    @property
    def counted(self) -> list[Record]:
        """Requests that count and were answered."""
        return [record for record in self.records if record.phase == "measured" and record.ok]


@dataclass(frozen=True)
class Point:
    """All passes of one arm at one load."""

    arm: str
    load: Load
    runs: tuple[Run, ...]

    @property
    def valid(self) -> bool:
        """Whether every pass is."""
        return all(run.result.verdict.valid for run in self.runs)

    @property
    def requests(self) -> int:
        """Requests that count, over all passes."""
        return sum(run.result.summary.requests for run in self.runs)

    def by_request(self, values: Values) -> dict[int, list[float]]:
        """Values of every pass under the index of their request."""
        found: dict[int, list[float]] = {}
        for run in self.runs:
            for record in run.counted:
                found.setdefault(record.index, []).extend(values(record))
        return found

    def distribution(self, values: Values) -> Distribution | None:
        """Percentiles over all passes; a request's passes are drawn together."""
        found = self.by_request(values)
        return distribution([found[index] for index in sorted(found)])

    @property
    def goodput(self) -> Estimate | None:
        """Share of requests that kept the promises."""
        kept = [
            run.result.slo.good(record)
            for run in self.runs
            for record in run.records
            if record.phase == "measured"
        ]
        return share(kept)

    def mean(self, figure: Callable[[Result], float | None]) -> float | None:
        """Mean of a figure over the passes that have it."""
        known = [value for run in self.runs if (value := figure(run.result)) is not None]
        return sum(known) / len(known) if known else None

    @property
    def completed(self) -> float:
        """Requests answered a second."""
        return self.mean(lambda result: result.summary.request_rate) or 0.0

    def answered(self, idle: float) -> float:
        """The same, less the seconds that an answer takes anyway, by which no server is behind.

        Else a short run would look slow for its last answer alone.
        """

        def rate(result: Result) -> float | None:
            busy = result.summary.seconds - idle
            return (result.summary.requests - result.summary.failed) / busy if busy > 0 else None

        return self.mean(rate) or 0.0

    @property
    def offered(self) -> float | None:
        """Requests due a second, by the schedule."""
        return self.mean(lambda result: result.summary.offered_rate)

    @property
    def good(self) -> float:
        """Requests a second that kept the promises."""
        return self.mean(lambda result: result.summary.good_rate) or 0.0


def points(runs: Sequence[Run]) -> list[Point]:
    """Runs gathered by arm and load, in the order in which they first occur."""
    gathered: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        gathered.setdefault((run.arm, run.result.load.label), []).append(run)
    return [Point(arm, found[0].result.load, tuple(found)) for (arm, _), found in gathered.items()]
