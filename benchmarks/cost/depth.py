"""`python -m benchmarks.cost depth`: time to first token at full depth, of two efficiency tables.

    python -m benchmarks.cost efficiency --model llava-next-7b --layers 1 --policies cdpruner
    python -m benchmarks.cost efficiency --model llava-next-7b --layers 4 --policies cdpruner
    python -m benchmarks.cost depth out/efficiency/llava-next-7b-{1,4}-layers.json

All layers cost the same, so time is linear in their number. The slope is the prefill of one layer;
the value at zero layers is vision tower, selection, HTTP and the language model's head.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import BenchmarkError
from benchmarks.common.report import format_estimate
from benchmarks.cost.efficiency import Efficiency
from vllm_autoprune.backbones import BACKBONE_SHAPES
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import DRAWS, Estimate, Floats, estimate, medians, resample


def compose(shallow: Efficiency, deep: Efficiency, depth: int) -> dict[str, tuple[Estimate, ...]]:
    """Of every arm at ``depth`` layers: seconds of a layer, of all else, TTFT; gains; ratio.

    Gains are over the first arm, of a layer and of TTFT; the ratio is that of a second question to
    the first. Intervals: 95 %, by bootstrap over requests, which are the same in every arm and at
    both depths. Raises :class:`BenchmarkError` where tables cannot be combined.
    """
    low, high, more = shallow.measured(), deep.measured(), deep.layers - shallow.layers
    described = (shallow.model, shallow.budget, shallow.digests, list(low))
    if described != (deep.model, deep.budget, deep.digests, list(high)):
        raise BenchmarkError(
            "the tables differ in model, budget, states or arms -> measure both again"
        )
    if more <= 0:
        raise BenchmarkError(
            f"depths {shallow.layers} and {deep.layers}: give the shallow one first"
        )
    counts = {len(arm.ttft) for arm in (*low.values(), *high.values())}
    if len(counts) != 1:
        raise BenchmarkError(f"arms answered different numbers of requests: {sorted(counts)}")
    rows = resample(counts.pop(), DRAWS)

    def fit(below: Sequence[float], above: Sequence[float]) -> tuple[Floats, Floats]:
        """Slope per layer and value at zero layers, for every resample."""
        base, top = medians(np.asarray(below), rows), medians(np.asarray(above), rows)
        slope = (top - base) / more
        return slope, base - slope * shallow.layers

    composed, reference = {}, None
    for arm, measured in low.items():
        layer, fixed = fit(measured.ttft, high[arm].ttft)
        layer_again, fixed_again = fit(measured.again, high[arm].again)
        ttft, again = fixed + layer * depth, fixed_again + layer_again * depth
        reference = reference or (layer, ttft)
        figures = (layer, fixed, ttft, reference[0] / layer, reference[1] / ttft, again / ttft)
        composed[arm] = tuple(map(estimate, figures))
    return composed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the two files."""
    parser.add_argument("shallow", type=Path, help="JSON file of the table with fewer layers")
    parser.add_argument("deep", type=Path, help="JSON file of the table with more layers")


def run(options: argparse.Namespace) -> int:
    """Print the composed table; 0."""
    paths = (options.shallow, options.deep)
    try:
        shallow, deep = (Efficiency.model_validate_json(path.read_text()) for path in paths)
        depth = BACKBONE_SHAPES[shallow.model].layers
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BenchmarkError(f"not a table of benchmarks.cost efficiency: {reason}") from error
    styles = ((1000.0, 1), (1000.0, 0), (1.0, 2), (1.0, 2), (1.0, 2), (1.0, 2))
    rows = [
        [arm, *(format_estimate(f, *s, " to ") for f, s in zip(figures, styles, strict=True))]
        for arm, figures in compose(shallow, deep, depth).items()
    ]
    columns = (
        "arm", "a layer, ms", "all but the layers, ms", "TTFT, s", "prefill gain", "TTFT gain",
        "second question / first",
    )  # fmt: skip
    requests = len(next(iter(shallow.measured().values())).ttft)
    print(
        f"{shallow.model}, K = {shallow.budget}; composed for {depth} language layers from "
        f"measurements of {shallow.layers} and {deep.layers}; {requests} requests each\n"
    )
    print(Table("", columns, rows, "l" + "r" * 6).markdown())
    return 0
