"""One arm at one load, with the records of all passes pooled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from benchmarks.common.request_record import Record
from benchmarks.load.result import RECORDS, RESULT, Distribution, Result, distribution, share
from benchmarks.load.schedule import Load
from vllm_autoprune.statistics import Estimate

Values = Callable[[Record], Sequence[float]]
"""The values that one answered request contributes."""


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
    def records_link(self) -> str:
        """Link from the report to the file that has every request."""
        return quote(f"{self.folder}/{RECORDS}")

    @property
    def result_link(self) -> str:
        """Link from the report to the file that has the figures."""
        return quote(f"{self.folder}/{RESULT}")

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
        """Whether every pass is valid."""
        return all(run.result.verdict.valid for run in self.runs)

    @property
    def requests(self) -> int:
        """Requests that count, over all passes."""
        return sum(run.result.summary.requests for run in self.runs)

    def by_request(self, values: Values) -> dict[int, list[float]]:
        """Values of all passes by the index of their request."""
        by_index: dict[int, list[float]] = {}
        for run in self.runs:
            for record in run.counted:
                by_index.setdefault(record.index, []).extend(values(record))
        return by_index

    def distribution(self, values: Values) -> Distribution | None:
        """Percentiles over all passes; the passes of a request are resampled together."""
        by_index = self.by_request(values)
        return distribution([by_index[index] for index in sorted(by_index)])

    @property
    def goodput(self) -> Estimate | None:
        """Share of requests that met the objective."""
        good = [
            run.result.slo.good(record)
            for run in self.runs
            for record in run.records
            if record.phase == "measured"
        ]
        return share(good)

    def mean(self, figure: Callable[[Result], float | None]) -> float | None:
        """Mean of a figure over the passes that have it."""
        known = [value for run in self.runs if (value := figure(run.result)) is not None]
        return sum(known) / len(known) if known else None

    @property
    def completed(self) -> float:
        """Requests answered a second."""
        return self.mean(lambda result: result.summary.request_rate) or 0.0

    def answered(self, idle: float) -> float:
        """The same, without the ``idle`` seconds that one answer takes on an idle server.

        Otherwise the last answer alone would make a short run look slow.
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
        """Requests a second that met the objective."""
        return self.mean(lambda result: result.summary.good_rate) or 0.0


def group_runs(runs: Sequence[Run]) -> list[Point]:
    """Points by arm and load, in the order in which they first occur."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.arm, run.result.load.label), []).append(run)
    return [Point(arm, own[0].result.load, tuple(own)) for (arm, _), own in groups.items()]
