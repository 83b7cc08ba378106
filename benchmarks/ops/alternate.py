"""Times several pieces of work side by side, in alternating order, in one process.

Knows nothing about what the work is. Torch alone.

What the machine does meanwhile falls on all of them alike, and ratios are of medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

Work = Callable[[], object]


def alternately(
    works: Mapping[str, Work], rounds: int, *, warm_up: int = 2
) -> dict[str, list[float]]:
    """Seconds of each work in each round; every other round goes backwards."""
    names = list(works)
    taken: dict[str, list[float]] = {name: [] for name in names}
    with torch.inference_mode():
        for name in names * warm_up:
            works[name]()
        for turn in range(rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                _finish()
                begun = time.perf_counter()
                works[name]()
                _finish()
                taken[name].append(time.perf_counter() - begun)
    return taken


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
