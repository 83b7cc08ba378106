"""Settings, and times of several functions in alternating order. Needs torch only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

Work = Callable[[], object]
Times = dict[str, list[float]]
"""Seconds by the name of the work, one value a round."""

_BEGIN = time.monotonic()


def measure_alternately(
    works: Mapping[str, Work],
    rounds: int,
    *,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Seconds of each work in each round; every second round is in reverse order."""
    names = list(works)
    seconds: Times = {name: [] for name in names}
    with torch.inference_mode():
        for name in names * warm_up:
            works[name]()
        for turn in range(rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                _synchronize()
                begin = clock()
                works[name]()
                _synchronize()
                seconds[name].append(clock() - begin)
    return seconds


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def log_progress(line: str) -> None:
    """Print one line with the seconds since the start; the report's own needs more than torch."""
    print(f"[{time.monotonic() - _BEGIN:6.1f} s] {line}", file=sys.stderr, flush=True)


def log_medians(size: object, times: Mapping[str, Sequence[float]]) -> None:
    """Print the median times of one size."""
    medians = (f"{name} {1000 * median(own):.2f} ms" for name, own in times.items())
    log_progress(f"{size}: {', '.join(medians)}")


@dataclass(frozen=True)
class Settings:
    """``quick``: a few rounds of small sizes, as a trial run."""

    quick: bool = False

    def rounds(self, wanted: int) -> int:
        """How many alternating rounds are measured."""
        return 2 if self.quick else wanted
