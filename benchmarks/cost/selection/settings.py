"""Settings of the measurements of token selection."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """``quick``: a few rounds of small sizes, as a trial run."""

    quick: bool = False

    def rounds(self, wanted: int) -> int:
        """How many alternating rounds are measured."""
        return 2 if self.quick else wanted
