"""What all measurements share: which models, where results go, how much to measure.

Knows nothing about any one measurement.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

STATE = "autoprune"
_BEGUN = time.monotonic()


@dataclass(frozen=True)
class Setting:
    """Options of the command line."""

    model: Path
    text_tower: Path
    layers: int
    quick: bool
    out: Path

    def log(self, name: str) -> Path:
        """Where a server's output goes."""
        self.out.mkdir(parents=True, exist_ok=True)
        return self.out / f"{name}.log"


def progress(line: str) -> None:
    """Tell how far it is, on stderr."""
    print(f"[overhead {time.monotonic() - _BEGUN:6.1f} s] {line}", file=sys.stderr, flush=True)
