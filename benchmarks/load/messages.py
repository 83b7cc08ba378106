"""Messages between the coordinator and the workers of a load test, as JSON.

Without workers, one locust runner sends the same messages to itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common import StrictModel

READY, START, RECORD, DONE = "load-ready", "load-start", "load-record", "load-done"


class ClientFacts(StrictModel):
    """One client process."""

    worker: int = 0
    cpu: float
    """Share of one CPU core used while requests were sent."""
    lag_p50: float
    lag_p99: float
    """Seconds by which an idle greenlet woke up late: the error of its time stamps."""
    broken: str | None = None
    """Why it stopped before its share was sent; None where it did not."""


class RunFacts(StrictModel):
    """All client processes of a run."""

    planned: int
    clients: tuple[ClientFacts, ...] = ()
    unwritten: str | None = None
    """Why records could not be written."""
    broken: str | None = None
    """Why the run ended early, where no client reports it."""

    @property
    def early(self) -> Sequence[str]:
        """Every reason for an early end, each once."""
        reasons = [self.broken, *(client.broken for client in self.clients)]
        return tuple(dict.fromkeys(reason for reason in reasons if reason))


class Ready(StrictModel):
    """A worker has warmed up the server and waits for the start."""

    digest: str
    """Of its request bodies, which must be those of the coordinator."""
    problem: str | None = None


class Start(StrictModel):
    """To one worker: when to start, and which share of the requests to send."""

    at: float
    """Unix time, which each worker converts to its own monotonic clock once."""
    index: int
    of: int
    """It sends the requests ``index``, ``index + of``, ``index + 2 of``, ..."""


class Done(StrictModel):
    """A worker has sent its share."""

    facts: ClientFacts
