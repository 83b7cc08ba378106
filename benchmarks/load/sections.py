"""The sections of a load report, each with the text that explains how to read it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from benchmarks.load.compare import FIGURES, Comparison, compare_answers, compare_arms
from benchmarks.load.paired import Paired
from benchmarks.load.points import Point, Run, e2e, itl, tpot, ttft
from benchmarks.load.result import LEVELS, Distribution, format_hits
from benchmarks.load.settings import CACHES, Workload
from benchmarks.load.sweep import KNEE, Sweep, build_sweep
from vllm_autoprune.pages.document import Section
from vllm_autoprune.pages.table import Cell, CellTone, PageRow, PageTable
from vllm_autoprune.statistics import Estimate

NO_ANSWER = Cell("no answer")


def build_ratios(points: Sequence[Point]) -> Section:
    """Every arm against the first, load by load."""
    compared = compare_arms(points)
    against = compared[0].against if compared else ""
    head = ["load", "arm", *FIGURES]
    rows: list[PageRow] = []
    passes: list[PageRow] = []
    for load, arm in dict.fromkeys((one.load, one.arm) for one in compared):
        own = [one for one in compared if (one.load, one.arm) == (load, arm)]
        rows.append([load.title, arm, *map(_ratio_cell, own)])
        ratios = [", ".join(f"{ratio:.3f}" for ratio in one.by_pass) for one in own]
        passes.append([load.title, arm, *ratios])
    return Section(
        f"Against {against}",
        [
            f"Ratios to {against} on the same requests, with 95 % intervals: below 1 is less. An "
            "interval covers the choice of requests, but not differences between passes, so "
            "compare the passes too."
        ],
        tables=[
            PageTable(head, rows, left=2),
            PageTable(head, passes, left=2, caption="Ratios of each pass", folded=True),
        ]
        if rows
        else [],
    )


def _ratio_cell(one: Comparison) -> Cell:
    ratio = one.ratio
    if ratio is None:
        return Cell("not valid")
    tone: CellTone = "good" if ratio.high < 1 else "bad" if ratio.low > 1 else ""
    return Cell(f"{ratio.value:.3f}", f"{ratio.low:.3f}–{ratio.high:.3f}", tone=tone)


def build_sweeps(paired: Paired, points: Sequence[Point]) -> Section:
    """The knee and the highest rate of each arm."""
    slo = paired.plan.slo
    arms = dict.fromkeys(point.arm for point in points if point.load.rate is not None)
    rows = [_sweep_row(build_sweep([p for p in points if p.arm == arm], slo)) for arm in arms]
    head = ["arm", "knee", "within the objective", "by the upper bound", "saturation"]
    return Section(
        "Knee and highest rate, requests/s",
        [
            f"Objective: {slo.describe()} for 99 % of requests. Knee: the highest rate that the "
            f"server keeps up with, median TTFT at most {KNEE:g} times that of the lowest valid "
            "rate. The highest rate within the objective is kept up with, too. Only measured "
            "rates, two of them where a run between them is not valid. The upper bound is that of "
            "the interval of p99 TTFT."
        ],
        tables=[PageTable(head, rows)] if rows else [],
    )


def _sweep_row(sweep: Sweep) -> list[str]:
    note = "reached" if sweep.saturated else "not reached: try higher rates"
    return [sweep.arm, str(sweep.knee), str(sweep.highest), str(sweep.surely), note]


def build_latencies(points: Sequence[Point]) -> Section:
    """Times to the first token, all passes together."""
    rows: list[PageRow] = []
    for point in points:
        good = point.goodput
        offered = point.offered if point.load.rate is not None else None
        rows.append(
            [
                *_head_cells(point),
                str(point.requests),
                *_percentile_cells(point.distribution(ttft), LEVELS),
                "–" if offered is None else f"{offered:.2f}",
                f"{point.completed:.2f}",
                _estimate_cell(good, 100) if good else NO_ANSWER,
            ]
        )
    head = ["load", "arm", "requests", *(f"TTFT p{level}, ms" for level in LEVELS)]
    return Section(
        "Time to first token",
        [
            "All passes together; in an open loop from the scheduled time, which a closed loop "
            "does not have. Goodput: the share of requests within the objective. †: too few "
            "requests for this percentile."
        ],
        tables=[PageTable([*head, "offered/s", "achieved/s", "goodput, %"], rows, left=2)]
        if rows
        else [],
    )


def build_decoding(points: Sequence[Point]) -> Section:
    """Times after the first token, and of the whole answer."""
    kinds = {"ITL": itl, "TPOT": tpot, "E2E": e2e}
    rows = [
        [
            *_head_cells(point),
            *(
                cell
                for values in kinds.values()
                for cell in _percentile_cells(point.distribution(values), (50, 99))
            ),
        ]
        for point in points
    ]
    head = [f"{name} p{level}, ms" for name in kinds for level in (50, 99)]
    return Section(
        "After the first token",
        [
            "ITL: gaps between deltas, which may contain more than one token. TPOT: by the "
            "server's count of tokens. E2E: to the last text."
        ],
        tables=[PageTable(["load", "arm", *head], rows, left=2)] if rows else [],
    )


def _head_cells(point: Point) -> list[Cell]:
    arm = Cell(point.arm) if point.valid else Cell(point.arm, "not valid", tone="bad")
    return [Cell(point.load.title), arm]


def _percentile_cells(times: Distribution | None, levels: Sequence[int]) -> list[Cell]:
    if times is None:
        return [NO_ANSWER for _ in levels]
    enough = {quantile.level: quantile.enough for quantile in times.quantiles}
    return [_estimate_cell(times.at(level), 1000, "" if enough[level] else "†") for level in levels]


def _estimate_cell(estimate: Estimate, unit: float = 1.0, mark: str = "") -> Cell:
    figures = [unit * x for x in (estimate.value, estimate.low, estimate.high)]
    digits = 0 if figures[0] > 100 else 1
    value, low, high = (f"{figure:,.{digits}f}" for figure in figures)
    return Cell(value + mark, f"{low}–{high}")


def build_server_figures(points: Sequence[Point]) -> Section:
    """The server's own figures."""
    rows: list[PageRow] = []
    for point in points:
        before = point.mean(lambda r: r.metrics.visual_tokens_before)
        after = point.mean(lambda r: r.metrics.visual_tokens_after)
        kv = point.mean(lambda r: r.metrics.peak_kv_use)
        first = point.runs[0].result
        rows.append(
            [
                *_head_cells(point),
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
        [
            "From its /metrics and usage, first pass; visual tokens before and after pruning, as "
            "the plugin counts them. Token throughput is for information only: pruning lowers it."
        ],
        tables=[PageTable(head, rows, left=2)] if rows else [],
        folded=True,
    )


def build_agreement(points: Sequence[Point]) -> Section:
    """How often two arms give the same answer."""
    rows: list[PageRow] = [
        [
            one.load.title,
            one.arm,
            one.against,
            _estimate_cell(one.same, 100) if one.same else NO_ANSWER,
        ]
        for one in compare_answers(points)
    ]
    return Section(
        "Same answers",
        [
            "Share of requests with exactly the same answer. Greedy and of fixed length. It "
            "detects broken output; it does not measure accuracy."
        ],
        tables=[PageTable(["load", "arm", "against", "same, %"], rows, left=3)] if rows else [],
        folded=True,
    )


def build_runs(runs: Sequence[Run]) -> Section:
    """Each run with its verdict, and links to its files; notes where there are any."""
    noted = any(run.result.verdict.notes for run in runs)
    rows: list[PageRow] = [
        [
            f"{run.number + 1}",
            run.arm,
            run.result.load.describe(),
            Cell(run.result.verdict.describe(), tone="" if run.result.verdict.valid else "bad"),
            *(["; ".join(run.result.verdict.notes)] if noted else []),
            Cell(f"{len(run.records)} requests", link=run.records_link),
            Cell("run.json", link=run.result_link),
        ]
        for run in runs
    ]
    head = ["pass", "arm", "load", "verdict", *(["notes"] if noted else []), "records", "figures"]
    return Section("Every run, in order of time", tables=[PageTable(head, rows, left=len(head))])


def build_settings(paired: Paired, runs: Sequence[Run]) -> Section:
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
    rows.append(["load average before each run", ", ".join(busy)])
    head = ["arm", "digest of the state", "served as", "server information"]
    return Section(
        "Settings",
        code=shlex.join(paired.command),
        tables=[PageTable(head, arms, left=4), PageTable(["setting", "value"], rows, left=2)],
        folded=True,
    )


def _server_info(arm: str, runs: Sequence[Run]) -> str:
    info = next((run.result.server for run in runs if run.arm == arm), {})
    return ", ".join(f"{key} {value}" for key, value in info.items())


def _workload(workload: Workload) -> Iterator[tuple[str, str]]:
    yield "cache state", f"{workload.cache}: {CACHES[workload.cache]}"
    yield "requests", f"{workload.requests} a run, and {workload.warm_up} before the clock starts"
    yield "answers", f"{workload.output_tokens} tokens each, greedy"
    if workload.data:
        yield "data", f"{workload.data}, {workload.data_digest}"
    yield "longer side, pixels", describe_mix(workload.sides)
    yield "aspect", describe_mix(workload.aspects)
    yield "images a request", describe_mix(workload.images)
    yield "formats", describe_mix(workload.formats)
    yield "words in a question", describe_mix(workload.words)
    yield "seed", str(workload.seed)


def describe_mix(mix: tuple[tuple[object, float], ...]) -> str:
    """The mix in words: each value with its share."""
    if len(mix) == 1:
        return f"{mix[0][0]}"
    total = sum(weight for _, weight in mix)
    return ", ".join(f"{value} ({100 * weight / total:.0f} %)" for value, weight in mix)
