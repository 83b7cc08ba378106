"""What master and workers tell each other; without workers, a runner tells itself the same.

Knows nothing about locust. Contents are plain JSON, since they cross machines.
"""

from __future__ import annotations

from benchmarks.load.facts import ClientFacts
from benchmarks.load.plain import Plain

READY, GO, RECORD, DONE = "load-ready", "load-go", "load-record", "load-done"


class Ready(Plain):
    """A worker has warmed the server up and waits."""

    digest: str
    """Of its request bodies: workers that would send others must not."""
    problem: str | None = None


class Go(Plain):
    """The master's word to one worker: when to start, and which share is its own."""

    at: float
    """Unix time. Each worker turns it into its own monotonic clock, once."""
    index: int
    of: int
    """It sends the requests ``index``, ``index + of``, ``index + 2 of``, ..."""


class Done(Plain):
    """A worker's share is sent."""

    facts: ClientFacts
