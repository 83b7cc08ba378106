"""Time to first token summed over all questions on an image, and the break-even with stock."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.common import BenchmarkError
from benchmarks.common.report import Claim, Section, Table, format_estimate
from benchmarks.cost.depth import compose_seconds, read_efficiency
from benchmarks.cost.efficiency.models import SHAPES
from benchmarks.cost.questions.arms import SPLIT, STOCK
from vllm_autoprune.statistics import (
    DRAWS,
    Estimate,
    Floats,
    Indices,
    at_most,
    estimate,
    medians,
    resample,
    verdict_of,
)

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's palette, which colour-blind readers can distinguish."""

_DARK_STYLE = """
@media (prefers-color-scheme: dark) {
  [style*="#ffffff"] { fill: #1e2129 !important }
  [style*="#000000"] { stroke: #c9cdd6 !important }
  [style*="#dddddd"] { stroke: #3b404d !important }
  text { fill: #c9cdd6 }
}
"""
"""Colours of Matplotlib's page, axes, grid and text on a dark page."""

MOST = 64
"""Questions on one image."""

RATIO, BREAK_EVEN = 0.25, 50
"""Promises on the split at full depth: another question over the first one, and the break-even."""

TIMES: Mapping[str, tuple[str, str]] = {
    "time to first token": ("ttft", "again"),
    "processor time": ("processor", "processor_again"),
}


@dataclass(frozen=True)
class Costs:
    """Seconds of the first and of another question in one arm, for the sample and resamples."""

    first: Floats
    another: Floats

    @property
    def ratio(self) -> Estimate:
        """Another question over the first one."""
        return estimate(self.another / self.first)

    def total(self, questions: int) -> Estimate:
        """Seconds of all questions on an image."""
        return estimate(self.first + (questions - 1) * self.another)

    def break_even(self, stock: Costs) -> Estimate:
        """Questions an image up to which this takes no longer than stock; infinite: always.

        1 or less: stock is never slower.
        """
        gained, lost = stock.first - self.first, self.another - stock.another
        with np.errstate(divide="ignore"):
            equal = 1 + np.where(lost > 0, gained / lost, np.inf)
        low, high = np.quantile(equal[1:], (0.025, 0.975), method="nearest")
        return Estimate(float(equal[0]), float(low), float(high))


def read_costs(paths: Sequence[Path], times: tuple[str, str]) -> tuple[str, dict[str, Costs]]:
    """What the files of ``questions ttft`` describe, and every arm's costs.

    One file: as it was served. Two, the shallow one first: composed for the published depth.
    """
    if len(paths) not in (1, 2):
        raise BenchmarkError(f"{len(paths)} files: give one, or two at different depths")
    first, *others = [read_efficiency(path, times) for path in paths]
    if not others:
        rows = resample(len(next(iter(first.ttft.values()))), DRAWS)
        costs = {
            arm: Costs(_medians(first.ttft[arm], rows), _medians(first.again[arm], rows))
            for arm in first.ttft
        }
        return f"{first.model}, {first.layers} layers as served, K = {first.budget}", costs
    depth = SHAPES[first.model][0].layers
    composed = compose_seconds(first, others[0], depth)
    text = (
        f"{first.model}, K = {first.budget}, composed for {depth} layers from "
        f"{first.layers} and {others[0].layers}"
    )
    return text, {arm: Costs(*seconds) for arm, seconds in composed.items()}


def _medians(seconds: Sequence[float], rows: Indices) -> Floats:
    return medians(np.asarray(seconds, dtype=np.float64), rows)


def build_section(paths: Sequence[Path]) -> Section:
    """Claims and tables in wall-clock and in processor time."""
    claims: list[Claim] = []
    tables: list[Table] = []
    data: dict[str, object] = {}
    for name, times in TIMES.items():
        text, costs = read_costs(paths, times)
        if len(paths) > 1:
            claims += _claims(name, costs)
        tables.append(_table(name, costs))
        data[name] = {
            arm: {"first": float(one.first[0]), "another": float(one.another[0])}
            for arm, one in costs.items()
        }
    return Section(
        name="total",
        title=f"All questions on an image: {text}",
        setup=["medians over images, 95 % intervals by bootstrap over images"],
        claims=claims,
        tables=tables,
        data=data,
    )


def _claims(name: str, costs: Mapping[str, Costs]) -> Iterator[Claim]:
    if SPLIT not in costs:
        return
    ratio = costs[SPLIT].ratio
    promise = f"{name}: another question of the split at most {RATIO} of the first"
    yield Claim(promise, format_estimate(ratio, 1, 2, " to "), at_most(ratio, RATIO))
    if STOCK in costs:
        equal = costs[SPLIT].break_even(costs[STOCK])
        promise = f"{name}: the split's break-even with stock at {BREAK_EVEN} questions or more"
        verdict = verdict_of(equal.value >= BREAK_EVEN)
        if equal.low < BREAK_EVEN <= equal.high:
            verdict = "inconclusive"
        yield Claim(promise, format_estimate(equal, 1, 0, " to "), verdict)


def _table(name: str, costs: Mapping[str, Costs]) -> Table:
    counts = (4, 16, MOST)
    columns = (
        "arm", "first, s", "another, s", "another / first",
        *(f"{count} questions, s" for count in counts), "break-even with stock",
    )  # fmt: skip
    rows = [
        (
            arm,
            format_estimate(estimate(one.first), 1, 2, " to "),
            format_estimate(estimate(one.another), 1, 2, " to "),
            format_estimate(one.ratio, 1, 2, " to "),
            *(f"{one.total(count).value:.1f}" for count in counts),
            ""
            if arm == STOCK or STOCK not in costs
            else format_estimate(one.break_even(costs[STOCK]), 1, 0, " to "),
        )
        for arm, one in costs.items()
    ]
    return Table(f"In {name}; break-even in questions an image.", columns, rows, "l" + "r" * 7)


def read_many(path: Path) -> dict[str, list[float]]:
    """Seconds of each of the many questions that were asked on one image, by arm."""
    content = json.loads(path.read_text())
    return {arm: list(values) for arm, values in content.get("many", {}).items() if values}


def draw_totals(costs: Mapping[str, Costs], many: Mapping[str, Sequence[float]]) -> str:
    """Seconds over questions an image as SVG: lines from medians, dots as measured in a row."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("questions on one image")
    axes.set_ylabel("sum of times to first token, s")
    axes.grid(color="#ddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    questions = list(range(1, MOST + 1))
    for number, (arm, one) in enumerate(costs.items()):
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(
            questions, [one.total(q).value for q in questions], color=colour, label=arm, lw=1.4
        )
        sums = list(accumulate(many.get(arm, ())))
        dots = [q for q in (1, 2, 4, 8, 16, 32, 64) if q <= len(sums)]
        axes.plot(dots, [sums[q - 1] for q in dots], "o", color=colour, markersize=4)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    figure.legend(fontsize=7, frameon=False, loc="outside lower center", ncols=3)
    out = io.StringIO()
    # A fixed salt and no date: the same figures give the same file.
    with mpl.rc_context({"svg.hashsalt": "load", "svg.fonttype": "none", "font.family": "sans"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :].replace("</style>", f"{_DARK_STYLE}</style>", 1)
