"""Full depth, composed from one table at two depths: what a layer costs, and what does not grow.

Knows nothing about servers; it reads the JSON files that `python -m benchmarks.efficiency` wrote.

    python -m benchmarks.efficiency --model llava-next-7b --layers 1 --policies cdpruner
    python -m benchmarks.efficiency --model llava-next-7b --layers 4 --policies cdpruner
    python -m benchmarks.efficiency.depth out/efficiency/llava-next-7b-{1,4}-layers.json

Layers are alike, so time to first token is linear in their number. Its slope is the prefill of one
layer; at full depth the slope times the depth is the prefill of the language model, and what is
left at depth zero is the vision tower, the selection, HTTP and the language model's head.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.efficiency.models import SHAPES
from benchmarks.overhead.statistics import DRAWS, SEED, Estimate

Floats = NDArray[np.float64]


class NotComparable(ValueError):
    """Two tables that are not of one model, budget and set of states at two depths."""


@dataclass(frozen=True)
class Table:
    """What one file says: seconds to the first token of each arm's requests, pass after pass."""

    model: str
    layers: int
    budget: int
    digests: Mapping[str, str | None]
    ttft: Mapping[str, tuple[float, ...]]
    again: Mapping[str, tuple[float, ...]]
    """The same of a second question on each request's image."""


@dataclass(frozen=True)
class Composed:
    """One arm at full depth, in seconds, and its gain over the first arm, as ratios."""

    layer: Estimate
    fixed: Estimate
    ttft: Estimate
    prefill_gain: Estimate
    ttft_gain: Estimate
    again: Estimate
    """Of a second question on the same image, as a share of the first one's."""


def read(path: Path) -> Table:
    """A table's file; arms that were not served are left out."""
    told = json.loads(path.read_text())
    first, again = (
        {
            arm: tuple(value for one in passes for value in one.get(name, ()))
            for arm, passes in told["passes"].items()
            if all("ttft" in one for one in passes)
        }
        for name in ("ttft", "again")
    )
    return Table(told["model"], told["layers"], told["budget"], told["digests"], first, again)


def compose(shallow: Table, deep: Table, depth: int) -> dict[str, Composed]:
    """Every arm at `depth` layers; the first one is what gains are over.

    Intervals: 95 %, by bootstrap over requests, which are the same in every arm and at both depths.
    Raises :class:`NotComparable` where the tables do not belong together.
    """
    alike = (shallow.model, shallow.budget, shallow.digests, list(shallow.ttft))
    if alike != (deep.model, deep.budget, deep.digests, list(deep.ttft)):
        raise NotComparable("the tables differ in model, budget, states or arms: measure both anew")
    if shallow.layers >= deep.layers:
        raise NotComparable(
            f"depths {shallow.layers} and {deep.layers}: give the shallow one first"
        )
    counts = {
        len(times)
        for table in (shallow, deep)
        for times in (*table.ttft.values(), *table.again.values())
    }
    if len(counts) != 1:
        raise NotComparable(f"arms answered different numbers of requests: {sorted(counts)}")
    (count,) = counts
    picks = np.random.default_rng(SEED).integers(count, size=(DRAWS, count))
    # Row 0 is the sample itself, the others are its resamples.
    rows = np.vstack((np.arange(count)[None], picks))
    lines = (shallow.layers, deep.layers)
    drawn = {arm: _line(lines, shallow.ttft[arm], deep.ttft[arm], rows) for arm in shallow.ttft}
    second = {arm: _line(lines, shallow.again[arm], deep.again[arm], rows) for arm in shallow.again}
    first_slope, first_rest = next(iter(drawn.values()))
    return {
        arm: Composed(
            layer=_estimate(slope),
            fixed=_estimate(rest),
            ttft=_estimate(rest + slope * depth),
            prefill_gain=_estimate(first_slope / slope),
            ttft_gain=_estimate((first_rest + first_slope * depth) / (rest + slope * depth)),
            again=_estimate((second[arm][1] + second[arm][0] * depth) / (rest + slope * depth)),
        )
        for arm, (slope, rest) in drawn.items()
    }


def _line(
    layers: tuple[int, int], shallow: Sequence[float], deep: Sequence[float], rows: NDArray[np.intp]
) -> tuple[Floats, Floats]:
    """Slope a layer and value at no layers, one of each for every row of picked requests."""
    low, high = (
        np.median(np.asarray(times, dtype=np.float64)[rows], axis=1) for times in (shallow, deep)
    )
    slope = (high - low) / (layers[1] - layers[0])
    return slope, low - slope * layers[0]


def _estimate(drawn: Floats) -> Estimate:
    low, high = np.percentile(drawn[1:], (2.5, 97.5))
    return Estimate(float(drawn[0]), float(low), float(high))


def markdown(shallow: Table, deep: Table, depth: int, arms: Mapping[str, Composed]) -> str:
    """The composed table and how it came about."""
    count = len(next(iter(shallow.ttft.values())))
    lines = [
        f"{shallow.model}, K = {shallow.budget}; composed for {depth} language layers from "
        f"{shallow.layers} and {deep.layers}, which were measured; {count} requests of each",
        "",
        "| arm | a layer, ms | all but the layers, ms | TTFT, s | prefill gain | TTFT gain "
        "| another question, of the first |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    for arm, found in arms.items():
        cells = (
            _told(found.layer, 1000, 1),
            _told(found.fixed, 1000, 0),
            _told(found.ttft, 1, 2),
            _told(found.prefill_gain, 1, 2),
            _told(found.ttft_gain, 1, 2),
            _told(found.again, 1, 2),
        )
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _told(value: Estimate, unit: float, digits: int) -> str:
    middle, low, high = (
        f"{unit * part:.{digits}f}" for part in (value.value, value.low, value.high)
    )
    return f"{middle} ({low} to {high})"


def main(arguments: Sequence[str] | None = None) -> int:
    """0: composed and printed; 1: a file is no table, or the two do not belong together."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.efficiency.depth", description=__doc__.splitlines()[0]
    )
    parser.add_argument("shallow", type=Path)
    parser.add_argument("deep", type=Path)
    chosen = parser.parse_args(arguments)
    try:
        shallow, deep = read(chosen.shallow), read(chosen.deep)
        depth = SHAPES[shallow.model][0].layers
        print(markdown(shallow, deep, depth, compose(shallow, deep, depth)))
    except (NotComparable, OSError) as error:
        print(f"depth: {error}", file=sys.stderr)
        return 1
    except (ValueError, KeyError, TypeError) as error:
        print(f"depth: not a table of benchmarks.efficiency: {error!r}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
