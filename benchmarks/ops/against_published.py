"""Selection beside the published loop, and beside the similarity product alone.

Knows nothing about the prefill.
"""

from __future__ import annotations

import torch

from benchmarks.ops import ours, published
from benchmarks.ops.alternate import alternately
from benchmarks.ops.images import Size, make, size
from benchmarks.ops.setting import Setting, told
from benchmarks.overhead.report import Claim, Section, Table, quartiles
from benchmarks.overhead.statistics import Estimate, at_most, ratio_of_medians, spread

CLOSE = 1.25
"""Most that a selection may take of the similarity product alone, where that dominates."""

DOMINATES = 0.5
"""Share of the published selection from which on the product dominates."""

PER_TILE = (64, 144, 256, 576, 1024, 2880)
BATCHES = (1, 2, 4, 8)

Times = dict[str, list[float]]


def sizes(quick: bool) -> list[Size]:
    """N from 64 to 2880, one tile and five, 1 to 8 images."""
    if quick:
        return [size(64), size(64, 5, 2)]
    one = [size(n, 1, batch) for n in PER_TILE for batch in BATCHES]
    five = [size(n, 5, batch) for n in (64, 144, 256, 576) for batch in BATCHES]
    return one + five


def measure(setting: Setting) -> Section:
    """Every size, three ways in turn."""
    found: dict[Size, Times] = {}
    for of in sizes(setting.quick):
        # About ten seconds a size, but never fewer than five rounds.
        work = of.batch * of.tiles * of.per_tile**2
        rounds = max(5, min(31, int(8e7 / work)))
        found[of] = side_by_side(of, setting.rounds(rounds))
        told(of, found[of])
    return section(found)


def side_by_side(of: Size, rounds: int) -> Times:
    """Seconds of the product, of the published selection and of ours."""
    images = make(of)
    unit = (images.features / images.features.norm(dim=-1, keepdim=True)).float()
    unit = unit.view(of.batch * of.tiles, of.per_tile, -1)
    base = ours.policy(of.kept, exchange=False)
    count = of.kept // of.tiles
    return alternately(
        {
            "product": lambda: torch.bmm(unit, unit.transpose(1, 2)),
            "published": lambda: published.select(
                images.features, images.patches, images.text, of.tiles, count
            ),
            "ours": lambda: ours.select(base, of, images),
        },
        rounds,
        warm_up=1,
    )


def section(found: dict[Size, Times]) -> Section:
    """What is promised of each size, and what the worst of them did."""
    rows = []
    slower: dict[Size, Estimate] = {}
    beyond: dict[Size, Estimate] = {}
    for of, times in found.items():
        slower[of] = _ratio(times, "ours", "published")
        product = _ratio(times, "product", "published")
        against = _ratio(times, "ours", "product")
        if product.value >= DOMINATES:
            beyond[of] = against
        rows.append(
            (
                str(of),
                *(quartiles(spread(times[name])) for name in ("product", "published", "ours")),
                _times(slower[of]),
                _times(against),
                str(len(times["ours"])),
            )
        )
    claims = [_worst("selection never slower than the published loop", slower, 1.0)]
    if beyond:
        promise = (
            f"at most {CLOSE} x the similarity product alone where that is over half of the work"
        )
        claims.append(_worst(promise, beyond, CLOSE))
    columns = ("N → K", "product, ms", "published, ms", "ours, ms", "ours / published")
    table = Table(
        "From features to indices: medians (quartiles), and ratios with 95 % intervals.",
        (*columns, "ours / product", "rounds"),
        rows,
    )
    setup = [
        "CDPruner from features (bfloat16, D = 4096) to indices; "
        f"{torch.get_num_threads()} threads",
        "product: the float32 cosines in one call, directions given; published: a straightforward "
        "form of the published code, all images in one loop",
        "random clustered features; the three in turn, every other round backwards",
    ]
    data = {str(of): times for of, times in found.items()}
    return Section(
        "selection", "Selection against the published loop", setup, claims, [table], data
    )


def _ratio(times: Times, over: str, under: str) -> Estimate:
    return ratio_of_medians([[t] for t in times[over]], [[t] for t in times[under]])


def _times(estimate: Estimate) -> str:
    return f"{estimate.value:.2f} ({estimate.low:.2f}–{estimate.high:.2f})"


def _worst(promise: str, found: dict[Size, Estimate], bound: float) -> Claim:
    verdicts = {of: at_most(estimate, bound) for of, estimate in found.items()}
    counts = {
        v: sum(1 for x in verdicts.values() if x == v) for v in sorted(set(verdicts.values()))
    }
    summed = ", ".join(f"{v} at {count} of {len(found)} sizes" for v, count in counts.items())
    worst = max(found, key=lambda of: found[of].value)
    measured = f"{summed}; largest ratio {_times(found[worst])} at {worst}"
    total = next(v for v in ("does not hold", "open", "holds") if v in counts)
    return Claim(promise, measured, total)
