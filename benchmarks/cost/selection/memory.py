"""Peak memory of a selection, in similarity matrices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.report import Claim, Section, Table
from benchmarks.cost.selection import ours, published
from benchmarks.cost.selection.images import WIDTH, Size, draw_images
from benchmarks.cost.selection.timing import Settings, Work, log_progress
from vllm_autoprune.statistics import verdict_of

SIZES = (
    Size(576, 1, 1, 64),
    Size(576, 1, 4, 64),
    Size(576, 5, 1, 320),
    Size(1024, 1, 1, 112),
    Size(2880, 1, 1, 320),
)
SMALL = 0.05
"""Tolerance for masks, scores and indices, as a share of one matrix."""

FLOAT = 4


@dataclass(frozen=True)
class Peak:
    """Peak bytes of both selections, and the parts that grow with N only."""

    ours: int
    published: int
    size: Size

    @property
    def matrix(self) -> int:
        """One similarity matrix for every tile."""
        return self.size.batch * self.size.tiles * self.size.per_tile**2 * FLOAT

    @property
    def rows(self) -> int:
        """Unit vectors of one tile, in bfloat16 and in float32."""
        return self.size.per_tile * WIDTH * FLOAT * 3 // 2

    @property
    def factors(self) -> int:
        """Cholesky factors of every tile, K rounded up to a cache line."""
        kept = -(-(self.size.kept // self.size.tiles) // 16) * 16
        return self.size.batch * self.size.tokens * kept * FLOAT

    @property
    def matrices(self) -> float:
        """Peak beyond unit vectors and factors, in similarity matrices."""
        return (self.ours - max(self.rows, self.factors)) / self.matrix


def measure(settings: Settings) -> Section:
    """Measure the allocations of a selection from features to indices."""
    peaks = []
    for size in SIZES[:1] if settings.quick else SIZES:
        images, base, count = (
            draw_images(size),
            ours.build_policy(size.kept, exchange=False),
            size.kept // size.tiles,
        )
        own = measure_peak(partial(ours.select, base, size, images))
        plain = (images.features, images.patches, images.text)
        theirs = measure_peak(partial(published.select, *plain, size.tiles, count))
        peaks.append(Peak(own, theirs, size))
        log_progress(f"{size}: {own / 2**20:.1f} MiB, published {theirs / 2**20:.1f} MiB")
    return build_section(peaks)


def build_section(peaks: list[Peak]) -> Section:
    """Claims and figures: does any size need more than one matrix a tile?"""
    worst = max(peaks, key=lambda peak: peak.matrices)
    promise = "extra memory at its peak: at most one similarity matrix per tile in flight"
    measured = (
        f"{worst.matrices:.2f} matrices at {worst.size}, beyond rows and factors that grow with N"
    )
    rows = [
        tuple(
            [str(p.size)]
            + [f"{b / 2**20:.1f}" for b in (p.ours, p.matrix, p.rows, p.factors, p.published)]
            + [f"{p.matrices:.2f}"]
        )
        for p in peaks
    ]
    setup = [
        "CDPruner from features (bfloat16, D = 4096) to indices; bytes beyond the inputs",
        "matrices a tile: the peak beyond the larger of one tile's unit vectors and all factors, "
        "which grow with N, not with its square",
    ]
    columns = ("N → K", "peak", "matrices of all tiles", "one tile's rows", "factors", "published")
    table = Table("MiB, by torch's allocator.", (*columns, "matrices a tile"), rows)
    claim = Claim(promise, measured, verdict_of(worst.matrices <= 1 + SMALL))
    return Section("memory", "Memory of a selection", setup, [claim], [table], {})


def measure_peak(work: Work) -> int:
    """Peak bytes allocated by torch on the CPU, temporaries inside operators included."""
    with torch.inference_mode():
        work()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            work()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    if results is None:
        raise RuntimeError("torch's profiler kept no record of allocations")
    events = [event for event in results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((int(event.nbytes()) for event in events), initial=0))
