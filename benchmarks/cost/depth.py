"""`python -m benchmarks.cost depth`: TTFT at full depth, from efficiency tables at two depths.

    python -m benchmarks.cost efficiency --model llava-next-7b --layers 1 --policies cdpruner
    python -m benchmarks.cost efficiency --model llava-next-7b --layers 4 --policies cdpruner
    python -m benchmarks.cost depth out/efficiency/llava-next-7b-{1,4}-layers.json

All layers cost the same, so time to first token is linear in their number. The slope is the prefill
of one layer; the value at zero layers is vision tower, selection, HTTP and the language model's
head.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import BenchmarkError
from benchmarks.common.report import Table, format_estimate
from benchmarks.cost.efficiency import SHAPES
from vllm_autoprune.statistics import DRAWS, Estimate, Floats, estimate, medians, resample

COLUMNS = (
    "arm", "a layer, ms", "all but the layers, ms", "TTFT, s", "prefill gain", "TTFT gain",
    "second question / first",
)  # fmt: skip


@dataclass(frozen=True)
class Efficiency:
    """One efficiency table: seconds to the first token of each arm's requests, over all passes."""

    model: str
    layers: int
    budget: int
    digests: Mapping[str, str | None]
    ttft: Mapping[str, tuple[float, ...]]
    again: Mapping[str, tuple[float, ...]]
    """The same for a second question on each image."""


def read_efficiency(path: Path) -> Efficiency:
    """The table in a file, without arms that could not be served."""
    content = json.loads(path.read_text())
    ttft, again = (
        {
            arm: tuple(value for entry in passes for value in entry.get(name, ()))
            for arm, passes in content["passes"].items()
            if all("ttft" in entry for entry in passes)
        }
        for name in ("ttft", "again")
    )
    model, layers, budget = content["model"], content["layers"], content["budget"]
    return Efficiency(model, layers, budget, content["digests"], ttft, again)


def compose(shallow: Efficiency, deep: Efficiency, depth: int) -> dict[str, tuple[Estimate, ...]]:
    """Figures of every arm at ``depth`` layers, as in :data:`COLUMNS`, seconds and ratios.

    Gains are over the first arm. Intervals: 95 %, by bootstrap over requests, which are the same in
    every arm and at both depths. Raises :class:`BenchmarkError` where tables cannot be combined.
    """
    described = (shallow.model, shallow.budget, shallow.digests, list(shallow.ttft))
    if described != (deep.model, deep.budget, deep.digests, list(deep.ttft)):
        raise BenchmarkError(
            "the tables differ in model, budget, states or arms -> measure both again"
        )
    more = deep.layers - shallow.layers
    if more <= 0:
        raise BenchmarkError(
            f"depths {shallow.layers} and {deep.layers}: give the shallow one first"
        )
    tables = (shallow.ttft, shallow.again, deep.ttft, deep.again)
    counts = {len(times) for table in tables for times in table.values()}
    if len(counts) != 1:
        raise BenchmarkError(f"arms answered different numbers of requests: {sorted(counts)}")
    rows = resample(counts.pop(), DRAWS)

    def fit(low: Sequence[float], high: Sequence[float]) -> tuple[Floats, Floats]:
        """Slope per layer and value at zero layers, for every resample."""
        below, above = (medians(np.asarray(times, dtype=np.float64), rows) for times in (low, high))
        slope = (above - below) / more
        return slope, below - slope * shallow.layers

    composed, reference = {}, None
    for arm in shallow.ttft:
        layer, fixed = fit(shallow.ttft[arm], deep.ttft[arm])
        layer_again, fixed_again = fit(shallow.again[arm], deep.again[arm])
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
    """Print the composed table; raises BenchmarkError where the files cannot be combined."""
    try:
        shallow, deep = read_efficiency(options.shallow), read_efficiency(options.deep)
        depth = SHAPES[shallow.model][0].layers
    except OSError as error:
        raise BenchmarkError(str(error)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"not a table of benchmarks.cost efficiency: {error!r}") from error
    styles = ((1000.0, 1), (1000.0, 0), (1.0, 2), (1.0, 2), (1.0, 2), (1.0, 2))
    rows = [
        (
            arm,
            *(format_estimate(f, *style, " to ") for f, style in zip(figures, styles, strict=True)),
        )
        for arm, figures in compose(shallow, deep, depth).items()
    ]
    print(
        f"{shallow.model}, K = {shallow.budget}; composed for {depth} language layers from "
        f"measurements of {shallow.layers} and {deep.layers}; "
        f"{len(next(iter(shallow.ttft.values())))} requests each\n"
    )
    print(Table("", COLUMNS, rows, "l" + "r" * 6).markdown())
    return 0
