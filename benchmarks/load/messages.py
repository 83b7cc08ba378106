"""Messages between the coordinator and the workers of a load test, as JSON.

Without workers, one locust runner sends the same messages to itself.
"""

from __future__ import annotations

from benchmarks.common import StrictModel
from benchmarks.load.result import ClientFacts

READY, START, RECORD, DONE = "load-ready", "load-start", "load-record", "load-done"


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
