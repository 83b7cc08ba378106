"""Time that the residual refinement adds to its base selection, in total and by part."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.common.report import Claim, Section, Table, format_excess, format_spread
from benchmarks.cost.selection import ours
from benchmarks.cost.selection.images import LLAVA, LLAVA_NEXT, Images, Size, draw_images
from benchmarks.cost.selection.timing import Settings, Times, Work, log_medians, measure_alternately
from vllm_autoprune import refine
from vllm_autoprune.statistics import at_most, ratio_of_medians, spread
from vllm_autoprune.tpdsl.atoms.pools import build_pool
from vllm_autoprune.tpdsl.atoms.scoring import run_signal

BOUND = 1.10
FULL, BASE = "with exchange", "base selection alone"


def measure(settings: Settings) -> Section:
    """Measure the same call with and without its exchange, in turn."""
    by_size: dict[Size, Times] = {}
    parts: dict[str, list[float]] = {}
    for size in LLAVA[:1] if settings.quick else (*LLAVA, *LLAVA_NEXT):
        images = draw_images(size)
        by_size[size] = measure_alternately(
            _build_works(size, images), settings.rounds(41 if size.tiles == 1 else 15)
        )
        log_medians(size, by_size[size])
        if size == LLAVA[-1] or settings.quick:
            parts = measure_alternately(_build_part_works(size, images), settings.rounds(41))
    return build_section(by_size, parts)


def _build_works(size: Size, images: Images) -> dict[str, Work]:
    full, base = ours.build_policy(size.kept), ours.build_policy(size.kept, exchange=False)
    return {
        FULL: lambda: refine(full, ours.build_tokens(size, images)),
        BASE: lambda: refine(base, ours.build_tokens(size, images)),
    }


def _build_part_works(size: Size, images: Images) -> dict[str, Work]:
    """Each signal and the pools, with the cosines of the base selection already computed."""
    policy, tokens = ours.build_policy(size.kept), ours.build_tokens(size, images)
    with torch.inference_mode():
        done = refine(policy, tokens)
    assert done.quality is not None
    quality, reference = done.quality, done.reference
    state = policy.state
    works: dict[str, Work] = {
        call.atom: partial(run_signal, call, tokens, reference) for call in state.scoring.signals
    }
    works["pools"] = lambda: build_pool(state.constraints.pool, tokens, quality, reference)
    return works


def build_section(by_size: dict[Size, Times], parts: Times) -> Section:
    """Claims and figures of every shape."""
    claims, rows = [], []
    for size, times in by_size.items():
        added = ratio_of_medians([[t] for t in times[FULL]], [[t] for t in times[BASE]])
        promise = f"{size}: refinement at most 10 % of the base selection's time"
        claims.append(Claim(promise, format_excess(added), at_most(added, BOUND)))
        rows.append((str(size), *(format_spread(spread(times[name])) for name in (BASE, FULL))))
    setup = [
        "state `autoprune`: five signals, two pools, q_e = 2; the same call with q_e = 0 is the "
        "base selection",
        f"D = 4096, bfloat16, {torch.get_num_threads()} threads, no cache",
    ]
    tables = [
        Table("Medians (quartiles), in turn.", ("N → K", f"{BASE}, ms", f"{FULL}, ms"), rows),
        Table(
            "Each part alone, 576 tokens of which 64 are kept, cosines already computed.",
            ("part", "ms"),
            [(name, format_spread(spread(times))) for name, times in parts.items()],
        ),
    ]
    data = {**{str(size): times for size, times in by_size.items()}, "parts": parts}
    return Section("refinement", "What refinement adds", setup, claims, tables, data)
