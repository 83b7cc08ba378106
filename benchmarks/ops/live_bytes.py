"""The most bytes that a piece of work holds at once, as torch's CPU allocator saw it.

Knows nothing about what the work is.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.ops.alternate import Work


def peak(work: Work) -> int:
    """Bytes beyond what was held before; what operators allocate inside themselves counts."""
    with torch.inference_mode():
        work()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            work()
    results = seen.profiler.kineto_results if seen.profiler is not None else None
    if results is None:
        raise RuntimeError("torch's profiler kept no record of allocations")
    events = [event for event in results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((int(event.nbytes()) for event in events), initial=0))
