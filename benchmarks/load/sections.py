"""The tables of a load report, each with the text that explains how to read it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.common.report import Table, format_estimate
from benchmarks.load.compare import FIGURES, compare_answers, compare_arms
from benchmarks.load.paired import Paired
from benchmarks.load.points import Point, Run, e2e, itl, tpot, ttft
from benchmarks.load.result import format_hits, format_percentiles
from benchmarks.load.sweep import KNEE, Sweep, build_sweep
from benchmarks.load.workload import CACHES, Workload, format_mix
from vllm_autoprune.statistics import Estimate


@dataclass(frozen=True)
class Section:
    """A title, a paragraph, and a table."""

    title: str
    text: str
    table: Table


@dataclass(frozen=True)
class Sections:
    """All sections, those that stand before the plots and those after them."""

    before_plots: Sequence[Section]
    after_plots: Sequence[Section]


@dataclass(frozen=True)
class Settings:
    """The command, and tables of arms, workload and machine."""

    command: str
    tables: Sequence[Table]


def sections(paired: Paired, runs: Sequence[Run], points: Sequence[Point]) -> Sections:
    """All sections that have rows."""
    before = [_ratios(points), _sweeps(paired, points)]
    after = [
        _latencies(points),
        _decoding(points),
        _server_figures(points),
        _same_answers(points),
        _every_run(runs),
    ]
    return Sections(*([one for one in part if one.table.rows] for part in (before, after)))


def settings(paired: Paired, runs: Sequence[Run]) -> Settings:
    """Command, arms, workload, machine."""
    arms = [
        [
            arm.name,
            (arm.digest or "none")[:16],
            arm.url or " ".join([arm.model, *arm.flags]),
            _server_info(arm.name, runs),
        ]
        for arm in paired.plan.arms
    ]
    rows = [[key, value] for key, value in _workload(paired.plan.workload)]
    rows += [[key, value] for key, value in (runs[0].result.environment.items() if runs else ())]
    busy = [run.result.environment["load average"] for run in runs]
    rows.append(["load average after each run", ", ".join(busy)])
    head = ["arm", "digest of the state", "served as", "server information"]
    return Settings(shlex.join(paired.command), [Table("", head, arms), Table("", ["", ""], rows)])


def _ratios(points: Sequence[Point]) -> Section:
    """Every arm against the first, load by load."""
    compared = compare_arms(points)
    rows = []
    for load, arm in dict.fromkeys((one.load, one.arm) for one in compared):
        by_figure = {one.figure: one for one in compared if (one.load, one.arm) == (load, arm)}
        cells = [_ratio(by_figure[name].ratio, by_figure[name].by_pass) for name in FIGURES]
        rows.append([load, arm, *cells])
    against = compared[0].against if compared else ""
    return Section(
        f"Against {against}",
        f"Ratio to {against} on the same requests, with its 95 % interval; in brackets the ratio "
        "of each pass alone. Below 1 is less. The interval covers the choice of requests, but not "
        "differences between passes, so look at both.",
        Table("", ["load", "arm", *FIGURES], rows),
    )


def _ratio(estimate: Estimate | None, by_pass: Sequence[float]) -> str:
    if estimate is None:
        return "not valid"
    return f"{format_estimate(estimate, 1, 3)} [{', '.join(f'{one:.3f}' for one in by_pass)}]"


def _sweeps(paired: Paired, points: Sequence[Point]) -> Section:
    """The knee and the highest rate of each arm."""
    slo = paired.plan.slo
    arms = dict.fromkeys(point.arm for point in points if point.load.rate is not None)
    rows = [_sweep_row(build_sweep([p for p in points if p.arm == arm], slo)) for arm in arms]
    head = ["arm", "knee", "highest rate that meets it", "by the upper bound", "saturation"]
    return Section(
        "Knee and highest rate",
        f"Objective: {slo.describe()} for 99 % of requests. Knee: the highest rate that the server "
        f"keeps up with, median TTFT at most {KNEE:g} times that of the lowest valid rate. The "
        "highest rate that meets the objective is kept up with, too. Rates in requests/s; only "
        "measured ones, and two of them where a run between them is not valid. The upper bound is "
        "that of the interval of p99 TTFT.",
        Table("", head, rows),
    )


def _sweep_row(sweep: Sweep) -> list[str]:
    note = "reached" if sweep.saturated else "not reached: try higher rates"
    return [sweep.arm, str(sweep.knee), str(sweep.highest), str(sweep.surely), note]


def _validity(point: Point) -> str:
    return "valid" if point.valid else "not valid"


def _latencies(points: Sequence[Point]) -> Section:
    """Times to the first token, all passes together."""
    rows = []
    for point in points:
        times, good = point.distribution(ttft), point.goodput
        rows.append(
            [
                point.load.label,
                point.arm,
                _validity(point),
                str(point.requests),
                format_percentiles(times) if times else "no answer",
                f"{point.completed:.2f}",
                format_estimate(good, 100) if good else "",
            ]
        )
    head = ["load", "arm", "", "requests", "TTFT, ms", "completed/s", "goodput, %"]
    return Section(
        "Time to first token",
        "All passes together; in an open loop from the scheduled time. †: this percentile rests on "
        "too few requests.",
        Table("", head, rows),
    )


def _decoding(points: Sequence[Point]) -> Section:
    """Times after the first token, and of the whole answer."""
    rows = []
    for point in points:
        times = [point.distribution(values) for values in (itl, tpot, e2e)]
        cells = [format_percentiles(one) if one else "no answer" for one in times]
        rows.append([point.load.label, point.arm, _validity(point), *cells])
    return Section(
        "After the first token",
        "ITL: gaps between deltas, which may contain more than one token. TPOT: by the server's "
        "count of tokens. E2E: to the last text.",
        Table("", ["load", "arm", "", "ITL, ms", "TPOT, ms", "E2E, ms"], rows),
    )


def _server_figures(points: Sequence[Point]) -> Section:
    """The server's own figures."""
    rows = []
    for point in points:
        before = point.mean(lambda r: r.metrics.visual_tokens_before)
        after = point.mean(lambda r: r.metrics.visual_tokens_after)
        kv = point.mean(lambda r: r.metrics.peak_kv_use)
        first = point.runs[0].result
        rows.append(
            [
                point.load.label,
                point.arm,
                f"{first.summary.image_rate:.2f}",
                f"{first.summary.output_token_rate:.1f}",
                f"{first.summary.prompt_tokens or 0:.1f}",
                "not counted" if before is None else f"{before:.0f} → {after or 0:.0f}",
                "not reported" if kv is None else f"{100 * kv:.1f}",
                format_hits(first.metrics.mm_cache_hits, first.metrics.mm_cache_queries),
                format_hits(first.metrics.prefix_cache_hits, first.metrics.prefix_cache_queries),
            ]
        )
    head = [
        "load", "arm", "images/s", "output tokens/s", "prompt tokens", "visual tokens",
        "peak KV use, %", "image cache hits", "prefix cache hits (tokens)",
    ]  # fmt: skip
    return Section(
        "Figures of the server",
        "From its /metrics and usage, first pass; visual tokens before and after pruning, as the "
        "plugin counts them. Token throughput is for information only: pruning lowers it.",
        Table("", head, rows),
    )


def _same_answers(points: Sequence[Point]) -> Section:
    """How often two arms give the same answer."""
    rows = [
        [one.load, one.arm, one.against, format_estimate(one.same, 100) if one.same else ""]
        for one in compare_answers(points)
    ]
    return Section(
        "Same answers",
        "Share of requests with exactly the same answer, %. Greedy and of fixed length. It detects "
        "broken output; it does not measure accuracy.",
        Table("", ["load", "arm", "against", "same, %"], rows),
    )


def _every_run(runs: Sequence[Run]) -> Section:
    """Each run with its verdict."""
    rows = [
        [
            f"{run.number + 1}",
            run.arm,
            run.result.load.describe(),
            run.result.verdict.describe(),
            "; ".join(run.result.verdict.notes),
            f"{run.folder}/records.jsonl",
        ]
        for run in runs
    ]
    head = ["pass", "arm", "load", "verdict", "notes", "records"]
    return Section("Every run, in order of time", "", Table("", head, rows))


def _server_info(arm: str, runs: Sequence[Run]) -> str:
    info = next((run.result.server for run in runs if run.arm == arm), {})
    return ", ".join(f"{key} {value}" for key, value in info.items())


def _workload(workload: Workload) -> Iterator[tuple[str, str]]:
    yield "cache state", f"{workload.cache}: {CACHES[workload.cache]}"
    yield "requests", f"{workload.requests} a run, and {workload.warm_up} before the clock starts"
    yield "answers", f"{workload.output_tokens} tokens each, greedy"
    yield "longer side, pixels", format_mix(workload.sides)
    yield "aspect", format_mix(workload.aspects)
    yield "images a request", format_mix(workload.images)
    yield "formats", format_mix(workload.formats)
    yield "words in a question", format_mix(workload.words)
    yield "seed", str(workload.seed)
