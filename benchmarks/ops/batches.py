"""What a batch of images costs beside as many selections of one image.

Knows nothing about how a batch is made in a server.
"""

from __future__ import annotations

import torch

from benchmarks.ops import ours
from benchmarks.ops.alternate import Work, alternately
from benchmarks.ops.images import Size, make
from benchmarks.ops.setting import Setting, told
from benchmarks.overhead.report import Claim, Section, Table, percent, quartiles
from benchmarks.overhead.statistics import Estimate, at_most, ratio_of_medians, spread
from vllm_autoprune import refine

BATCHES = (2, 4, 8)

Times = dict[str, list[float]]


def measure(setting: Setting) -> Section:
    """A batch, and its images one after the other, in turn."""
    found: dict[Size, Times] = {}
    for per_tile, kept in ((64, 8),) if setting.quick else ((64, 8), (144, 16), (576, 64)):
        for batch in BATCHES:
            of = Size(per_tile, 1, batch, kept)
            found[of] = alternately(_both(of), setting.rounds(25))
            told(of, found[of])
    return section(found)


def _both(of: Size) -> dict[str, Work]:
    policy, single = ours.policy(of.kept), Size(of.per_tile, 1, 1, of.kept)
    images, alone = make(of), [make(single, seed=i) for i in range(of.batch)]
    return {
        "together": lambda: refine(policy, ours.tokens(of, images)),
        "one by one": lambda: [refine(policy, ours.tokens(single, image)) for image in alone],
    }


def section(found: dict[Size, Times]) -> Section:
    """Whether a batch saves anything."""
    claims, rows = [], []
    for of, times in found.items():
        saved: Estimate = ratio_of_medians(
            [[t] for t in times["together"]], [[t] for t in times["one by one"]]
        )
        promise = f"{of}: less than {of.batch} selections"
        claims.append(Claim(promise, percent(saved), at_most(saved, 1.0)))
        rows.append((str(of), *(quartiles(spread(t)) for t in times.values())))
    setup = [f"state `autoprune` with its exchange, {torch.get_num_threads()} threads"]
    columns = ("N → K", "together, ms", "one by one, ms")
    table = Table("Medians (quartiles), in turn.", columns, rows)
    data = {str(of): times for of, times in found.items()}
    return Section("batches", "A batch against its images one by one", setup, claims, [table], data)
