"""Settings of the overhead measurements."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STATE = "autoprune"


@dataclass(frozen=True)
class Settings:
    """Which models are served, how much is measured, and where files go."""

    model: Path
    text_tower: Path
    layers: int
    quick: bool
    out: Path

    def log(self, name: str) -> Path:
        """The file of a server's output."""
        self.out.mkdir(parents=True, exist_ok=True)
        return self.out / f"{name}.log"
