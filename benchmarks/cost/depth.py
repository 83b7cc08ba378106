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
from benchmarks.cost.efficiency.models import SHAPES
from vllm_autoprune.statistics import (
    DRAWS,
    Estimate,
    Floats,
    Indices,
    estimate,
    medians,
    resample,
)


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


@dataclass(frozen=True)
class Composed:
    """One arm at full depth, in seconds, and its gain over the first arm, as ratios."""

    layer: Estimate
    fixed: Estimate
    ttft: Estimate
    prefill_gain: Estimate
    ttft_gain: Estimate
    again: Estimate
    """TTFT of a second question on the same image, over that of the first."""


def read_efficiency(path: Path) -> Efficiency:
    """The table in a file, without arms that could not be served."""
    content = json.loads(path.read_text())
    first, again = (
        {
            arm: tuple(value for one in passes for value in one.get(name, ()))
            for arm, passes in content["passes"].items()
            if all("ttft" in one for one in passes)
        }
        for name in ("ttft", "again")
    )
    return Efficiency(
        content["model"], content["layers"], content["budget"], content["digests"], first, again
    )


def compose(shallow: Efficiency, deep: Efficiency, depth: int) -> dict[str, Composed]:
    """Every arm at ``depth`` layers, and its gain over the first arm.

    Intervals: 95 %, by bootstrap over requests, which are the same in every arm and at both depths.
    Raises :class:`BenchmarkError` where the tables cannot be combined.
    """
    layers = (shallow.layers, deep.layers)
    rows = _draw_rows(shallow, deep)
    fits, seconds = {}, {}
    for arm in shallow.ttft:
        slope, rest = fits[arm] = _fit_line(layers, shallow.ttft[arm], deep.ttft[arm], rows)
        again_slope, again_rest = _fit_line(layers, shallow.again[arm], deep.again[arm], rows)
        seconds[arm] = (rest + slope * depth, again_rest + again_slope * depth)
    reference = next(iter(fits))
    return {
        arm: Composed(
            layer=estimate(slope),
            fixed=estimate(rest),
            ttft=estimate(seconds[arm][0]),
            prefill_gain=estimate(fits[reference][0] / slope),
            ttft_gain=estimate(seconds[reference][0] / seconds[arm][0]),
            again=estimate(seconds[arm][1] / seconds[arm][0]),
        )
        for arm, (slope, rest) in fits.items()
    }


def _draw_rows(shallow: Efficiency, deep: Efficiency) -> Indices:
    """Resamples of requests; raises :class:`BenchmarkError` where tables cannot be combined."""
    described = (shallow.model, shallow.budget, shallow.digests, list(shallow.ttft))
    if described != (deep.model, deep.budget, deep.digests, list(deep.ttft)):
        raise BenchmarkError(
            "the tables differ in model, budget, states or arms -> measure both again"
        )
    if shallow.layers >= deep.layers:
        raise BenchmarkError(
            f"depths {shallow.layers} and {deep.layers}: give the shallow one first"
        )
    counts = {
        len(times)
        for table in (shallow, deep)
        for times in (*table.ttft.values(), *table.again.values())
    }
    if len(counts) != 1:
        raise BenchmarkError(f"arms answered different numbers of requests: {sorted(counts)}")
    (count,) = counts
    return resample(count, DRAWS)


def _fit_line(
    layers: tuple[int, int], shallow: Sequence[float], deep: Sequence[float], rows: Indices
) -> tuple[Floats, Floats]:
    """Slope per layer and value at zero layers, for every resample."""
    low, high = (medians(np.asarray(times, dtype=np.float64), rows) for times in (shallow, deep))
    slope = (high - low) / (layers[1] - layers[0])
    return slope, low - slope * layers[0]


def markdown(
    shallow: Efficiency, deep: Efficiency, depth: int, arms: Mapping[str, Composed]
) -> str:
    """The composed table, with its origin."""
    count = len(next(iter(shallow.ttft.values())))
    columns = (
        "arm", "a layer, ms", "all but the layers, ms", "TTFT, s", "prefill gain", "TTFT gain",
        "second question / first",
    )  # fmt: skip
    rows = [
        (
            arm,
            _format(composed.layer, 1000, 1),
            _format(composed.fixed, 1000, 0),
            _format(composed.ttft),
            _format(composed.prefill_gain),
            _format(composed.ttft_gain),
            _format(composed.again),
        )
        for arm, composed in arms.items()
    ]
    return (
        f"{shallow.model}, K = {shallow.budget}; composed for {depth} language layers from "
        f"measurements of {shallow.layers} and {deep.layers}; {count} requests each\n\n"
        + Table("", columns, rows, "l" + "r" * 6).markdown()
    )


def _format(figure: Estimate, unit: float = 1.0, digits: int = 2) -> str:
    return format_estimate(figure, unit, digits, " to ")


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
    print(markdown(shallow, deep, depth, compose(shallow, deep, depth)))
    return 0
