"""When requests arrive: a schedule that is drawn once, before anything is sent.

Knows nothing about requests, nor about clocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.load.errors import LoadError


def arrivals(
    count: int, rate: float, burstiness: float = 1.0, seed: int = 0
) -> NDArray[np.float64]:
    """Seconds from the start at which each request is due, (count,), rising.

    Gaps are gamma distributed with mean 1 / ``rate`` seconds and shape ``burstiness``: 1 is a
    Poisson process, less is burstier, more is more regular (as ``vllm bench serve`` counts it).
    The same seed gives the same pattern at every rate, only faster or slower, so that points of
    a sweep differ in nothing else. Raises :class:`LoadError` for a schedule without a request.
    """
    problems = [
        f"{name} is {value:g}, which has to be above 0"
        for name, value in (("requests", count), ("rate", rate), ("burstiness", burstiness))
        if not value > 0
    ]
    if problems:
        raise LoadError(f"schedule is empty or has no end: {'; '.join(problems)}")
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / burstiness, size=count)
    return np.asarray(np.cumsum(gaps) / rate, dtype=np.float64)
