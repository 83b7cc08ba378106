"""Time of a selection: against the published code, the similarity product, and image by image."""

from __future__ import annotations

import torch

from benchmarks.common.report import (
    Claim,
    Section,
    Table,
    format_estimate,
    format_excess,
    format_spread,
)
from benchmarks.cost.selection import ours, published
from benchmarks.cost.selection.images import Size, draw_images, size_keeping
from benchmarks.cost.selection.timing import Settings, Times, Work, log_medians, measure_alternately
from vllm_autoprune import refine
from vllm_autoprune.statistics import Estimate, at_most, ratio_of_medians, spread

CLOSE = 1.25
"""Most that a selection may take of the time of the similarity product, where that dominates."""

DOMINATES = 0.5
"""Share of the published selection's time at which the product dominates it."""

PER_TILE = (64, 144, 256, 576, 1024, 2880)
BATCHES = (1, 2, 4, 8)


def sizes(quick: bool) -> list[Size]:
    """N from 64 to 2880, one tile and five, 1 to 8 images."""
    if quick:
        return [size_keeping(64), size_keeping(64, 5, 2)]
    one = [size_keeping(n, 1, batch) for n in PER_TILE for batch in BATCHES]
    five = [size_keeping(n, 5, batch) for n in (64, 144, 256, 576) for batch in BATCHES]
    return one + five


def measure(settings: Settings) -> Section:
    """Measure every size in three ways, in turn."""
    by_size: dict[Size, Times] = {}
    for size in sizes(settings.quick):
        # About ten seconds a size, but never fewer than five rounds.
        work = size.batch * size.tiles * size.per_tile**2
        rounds = max(5, min(31, int(8e7 / work)))
        by_size[size] = measure_size(size, settings.rounds(rounds))
        log_medians(size, by_size[size])
    return build_section(by_size)


def measure_size(size: Size, rounds: int) -> Times:
    """Seconds of the product, of the published selection and of ours."""
    images = draw_images(size)
    unit = (images.features / images.features.norm(dim=-1, keepdim=True)).float()
    unit = unit.view(size.batch * size.tiles, size.per_tile, -1)
    base = ours.build_policy(size.kept, exchange=False)
    count = size.kept // size.tiles
    return measure_alternately(
        {
            "product": lambda: torch.bmm(unit, unit.transpose(1, 2)),
            "published": lambda: published.select(
                images.features, images.patches, images.text, size.tiles, count
            ),
            "ours": lambda: ours.select(base, size, images),
        },
        rounds,
        warm_up=1,
    )


def build_section(by_size: dict[Size, Times]) -> Section:
    """Claims on all sizes, with the worst of them."""
    rows = []
    slower: dict[Size, Estimate] = {}
    beyond: dict[Size, Estimate] = {}
    for size, times in by_size.items():
        slower[size] = _ratio(times, "ours", "published")
        product = _ratio(times, "product", "published")
        against = _ratio(times, "ours", "product")
        if product.value >= DOMINATES:
            beyond[size] = against
        rows.append(
            (
                str(size),
                *(format_spread(spread(times[name])) for name in ("product", "published", "ours")),
                _format_ratio(slower[size]),
                _format_ratio(against),
                str(len(times["ours"])),
            )
        )
    claims = [_build_worst_claim("selection never slower than the published loop", slower, 1.0)]
    if beyond:
        promise = (
            f"at most {CLOSE} x the similarity product alone where that is over half of the work"
        )
        claims.append(_build_worst_claim(promise, beyond, CLOSE))
    columns = ("N → K", "product, ms", "published, ms", "ours, ms", "ours / published")
    table = Table(
        "From features to indices: medians (quartiles), and ratios with 95 % intervals.",
        (*columns, "ours / product", "rounds"),
        rows,
    )
    setup = [
        "CDPruner from features (bfloat16, D = 4096) to indices; "
        f"{torch.get_num_threads()} threads",
        "product: the float32 cosines in one call, from unit vectors; published: the algorithm "
        "of the published code, all images in one loop",
        "random clustered features; the three in turn, every second round in reverse order",
    ]
    data = {str(size): times for size, times in by_size.items()}
    return Section(
        "selection", "Selection against the published loop", setup, claims, [table], data
    )


def _ratio(times: Times, over: str, under: str) -> Estimate:
    return ratio_of_medians([[t] for t in times[over]], [[t] for t in times[under]])


def _format_ratio(estimate: Estimate) -> str:
    return format_estimate(estimate, digits=2)


def _build_worst_claim(promise: str, estimates: dict[Size, Estimate], bound: float) -> Claim:
    verdicts = {size: at_most(estimate, bound) for size, estimate in estimates.items()}
    counts = {
        v: sum(1 for x in verdicts.values() if x == v) for v in sorted(set(verdicts.values()))
    }
    summary = ", ".join(f"{v} at {count} of {len(estimates)} sizes" for v, count in counts.items())
    worst = max(estimates, key=lambda size: estimates[size].value)
    measured = f"{summary}; largest ratio {_format_ratio(estimates[worst])} at {worst}"
    verdict = next(v for v in ("does not hold", "inconclusive", "holds") if v in counts)
    return Claim(promise, measured, verdict)


def measure_batches(settings: Settings) -> Section:
    """Measure a batch against its images one by one."""
    by_size: dict[Size, Times] = {}
    for per_tile, kept in ((64, 8),) if settings.quick else ((64, 8), (144, 16), (576, 64)):
        for batch in (2, 4, 8):
            size = Size(per_tile, 1, batch, kept)
            by_size[size] = measure_alternately(_build_batch_works(size), settings.rounds(25))
            log_medians(size, by_size[size])
    return build_batch_section(by_size)


def _build_batch_works(size: Size) -> dict[str, Work]:
    policy, single = ours.build_policy(size.kept), Size(size.per_tile, 1, 1, size.kept)
    images, alone = draw_images(size), [draw_images(single, seed=i) for i in range(size.batch)]
    return {
        "together": lambda: refine(policy, ours.build_tokens(size, images)),
        "one by one": lambda: [refine(policy, ours.build_tokens(single, image)) for image in alone],
    }


def build_batch_section(by_size: dict[Size, Times]) -> Section:
    """Claims and figures: does a batch save time?"""
    claims, rows = [], []
    for size, times in by_size.items():
        ratio = ratio_of_medians(
            [[t] for t in times["together"]], [[t] for t in times["one by one"]]
        )
        promise = f"{size}: less than {size.batch} selections"
        claims.append(Claim(promise, format_excess(ratio), at_most(ratio, 1.0)))
        rows.append((str(size), *(format_spread(spread(t)) for t in times.values())))
    setup = [f"state `autoprune` with its exchange, {torch.get_num_threads()} threads"]
    columns = ("N → K", "together, ms", "one by one, ms")
    table = Table("Medians (quartiles), in turn.", columns, rows)
    data = {str(size): times for size, times in by_size.items()}
    return Section("batches", "A batch against its images one by one", setup, claims, [table], data)
