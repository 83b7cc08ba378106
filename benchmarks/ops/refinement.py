"""What the residual refinement adds to its base selection, and which part of it costs what.

Knows nothing about what the parts do.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.ops import ours
from benchmarks.ops.alternate import Work, alternately
from benchmarks.ops.images import LLAVA, LLAVA_NEXT, Images, Size, make
from benchmarks.ops.setting import Setting, told
from benchmarks.overhead.report import Claim, Section, Table, percent, quartiles
from benchmarks.overhead.statistics import at_most, ratio_of_medians, spread
from vllm_autoprune import refine
from vllm_autoprune.tpdsl.atoms.pools import build_pool
from vllm_autoprune.tpdsl.atoms.scoring import run_signal

BOUND = 1.10
FULL, BASE = "with exchange", "base selection alone"

Times = dict[str, list[float]]


def measure(setting: Setting) -> Section:
    """The same call with and without its exchange, in turn."""
    found: dict[Size, Times] = {}
    parts: dict[str, list[float]] = {}
    for of in LLAVA[:1] if setting.quick else (*LLAVA, *LLAVA_NEXT):
        images = make(of)
        found[of] = alternately(_both(of, images), setting.rounds(41 if of.tiles == 1 else 15))
        told(of, found[of])
        if of == LLAVA[-1] or setting.quick:
            parts = alternately(_parts(of, images), setting.rounds(41))
    return section(found, parts)


def _both(of: Size, images: Images) -> dict[str, Work]:
    full, base = ours.policy(of.kept), ours.policy(of.kept, exchange=False)
    return {
        FULL: lambda: refine(full, ours.tokens(of, images)),
        BASE: lambda: refine(base, ours.tokens(of, images)),
    }


def _parts(of: Size, images: Images) -> dict[str, Work]:
    """Each signal and the pools, on a record whose cosines the base selection has made."""
    policy, made = ours.policy(of.kept), ours.tokens(of, images)
    with torch.inference_mode():
        done = refine(policy, made)
    assert done.quality is not None
    quality, reference = done.quality, done.reference
    state = policy.state
    works: dict[str, Work] = {
        call.atom: partial(run_signal, call, made, reference) for call in state.scoring.signals
    }
    works["pools"] = lambda: build_pool(state.constraints.pool, made, quality, reference)
    return works


def section(found: dict[Size, Times], parts: Times) -> Section:
    """What it adds at every shape."""
    claims, rows = [], []
    for of, times in found.items():
        added = ratio_of_medians([[t] for t in times[FULL]], [[t] for t in times[BASE]])
        promise = f"{of}: refinement at most 10 % of the base selection's time"
        claims.append(Claim(promise, percent(added), at_most(added, BOUND)))
        rows.append((str(of), *(quartiles(spread(times[name])) for name in (BASE, FULL))))
    setup = [
        "state `autoprune`: five signals, two pools, q_e = 2; the same call with q_e = 0 is the "
        "base selection",
        f"D = 4096, bfloat16, {torch.get_num_threads()} threads, nothing kept from before",
    ]
    tables = [
        Table("Medians (quartiles), in turn.", ("N → K", f"{BASE}, ms", f"{FULL}, ms"), rows),
        Table(
            "Each part by itself, 576 tokens of which 64 are kept, cosines known.",
            ("part", "ms"),
            [(name, quartiles(spread(times))) for name, times in parts.items()],
        ),
    ]
    data = {**{str(of): times for of, times in found.items()}, "parts": parts}
    return Section("refinement", "What refinement adds", setup, claims, tables, data)
