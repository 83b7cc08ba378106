"""Options that all measurements share, and how a run tells what it is doing.

Knows nothing about any one measurement.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

_BEGUN = time.monotonic()


@dataclass(frozen=True)
class Setting:
    """``quick``: a few rounds of small sizes, to see that all of it runs."""

    quick: bool = False

    def rounds(self, wanted: int) -> int:
        """How many alternating rounds are made."""
        return 2 if self.quick else wanted


def progress(line: str) -> None:
    """Tell how far it is, on stderr."""
    print(f"[ops {time.monotonic() - _BEGUN:6.1f} s] {line}", file=sys.stderr, flush=True)


def told(of: object, times: Mapping[str, Sequence[float]]) -> None:
    """Tell the medians of one size."""
    medians = (f"{name} {1000 * median(taken):.2f} ms" for name, taken in times.items())
    progress(f"{of}: {', '.join(medians)}")
