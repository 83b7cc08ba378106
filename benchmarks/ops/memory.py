"""How many N x N matrices a selection holds at once.

Knows nothing about time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from benchmarks.ops import ours, published
from benchmarks.ops.images import WIDTH, Size, make
from benchmarks.ops.live_bytes import peak
from benchmarks.ops.setting import Setting, progress
from benchmarks.overhead.report import Claim, Section, Table
from benchmarks.overhead.statistics import plainly

SIZES = (
    Size(576, 1, 1, 64),
    Size(576, 1, 4, 64),
    Size(576, 5, 1, 320),
    Size(1024, 1, 1, 112),
    Size(2880, 1, 1, 320),
)
SMALL = 0.05
"""Share of one matrix that masks, scores and indices may take together."""

FLOAT = 4


@dataclass(frozen=True)
class Peak:
    """Bytes held at most, and what of them grows with N alone."""

    ours: int
    published: int
    of: Size

    @property
    def matrix(self) -> int:
        """One similarity matrix for every tile."""
        return self.of.batch * self.of.tiles * self.of.per_tile**2 * FLOAT

    @property
    def rows(self) -> int:
        """Directions of one tile: in bfloat16, and the float32 that is made from them."""
        return self.of.per_tile * WIDTH * FLOAT * 3 // 2

    @property
    def factors(self) -> int:
        """Cholesky factors of every tile, K rounded up to a cache line."""
        kept = -(-(self.of.kept // self.of.tiles) // 16) * 16
        return self.of.batch * self.of.tokens * kept * FLOAT

    @property
    def matrices(self) -> float:
        """Peak beyond directions and factors, in similarity matrices."""
        return (self.ours - max(self.rows, self.factors)) / self.matrix


def measure(setting: Setting) -> Section:
    """The allocator's count, of a selection from features to indices."""
    found = []
    for of in SIZES[:1] if setting.quick else SIZES:
        images, base, count = make(of), ours.policy(of.kept, exchange=False), of.kept // of.tiles
        taken = peak(partial(ours.select, base, of, images))
        plain = (images.features, images.patches, images.text)
        theirs = peak(partial(published.select, *plain, of.tiles, count))
        found.append(Peak(taken, theirs, of))
        progress(f"{of}: {taken / 2**20:.1f} MiB, published {theirs / 2**20:.1f} MiB")
    return section(found)


def section(found: list[Peak]) -> Section:
    """Whether any size held more than one matrix a tile."""
    worst = max(found, key=lambda peak: peak.matrices)
    promise = "extra memory at its peak: at most one similarity matrix per tile in flight"
    measured = (
        f"{worst.matrices:.2f} matrices at {worst.of}, beyond rows and factors that grow with N"
    )
    rows = [
        tuple(
            [str(p.of)]
            + [f"{b / 2**20:.1f}" for b in (p.ours, p.matrix, p.rows, p.factors, p.published)]
            + [f"{p.matrices:.2f}"]
        )
        for p in found
    ]
    setup = [
        "CDPruner from features (bfloat16, D = 4096) to indices; bytes beyond the inputs",
        "matrices a tile: the peak beyond the larger of one tile's directions and all factors, "
        "which grow with N, not with its square",
    ]
    columns = ("N → K", "peak", "matrices of all tiles", "one tile's rows", "factors", "published")
    table = Table("MiB, by torch's allocator.", (*columns, "matrices a tile"), rows)
    claim = Claim(promise, measured, plainly(worst.matrices <= 1 + SMALL))
    return Section("memory", "Memory of a selection", setup, [claim], [table], {})
