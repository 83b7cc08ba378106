"""What a run knows beside its records: how its clients fared, and what ended it.

Knows nothing about servers.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.load.plain import Plain


class ClientFacts(Plain):
    """One client process."""

    worker: int = 0
    cpu: float
    """Share of one core that it used while requests were sent."""
    lag_p50: float
    lag_p99: float
    """Seconds by which a greenlet that does nothing but sleep woke up late: how wrong a stamp may
    be because the process was busy."""
    broken: str | None = None
    """Why it stopped before its share was sent."""


class RunFacts(Plain):
    """All client processes of a run."""

    planned: int
    clients: tuple[ClientFacts, ...] = ()
    unwritten: str | None = None
    """Why records could not be written."""
    broken: str | None = None
    """Why the run ended early, where no client can tell."""

    @property
    def early(self) -> Sequence[str]:
        """Every reason for an early end, each once."""
        told = [self.broken, *(client.broken for client in self.clients)]
        return tuple(dict.fromkeys(reason for reason in told if reason))
