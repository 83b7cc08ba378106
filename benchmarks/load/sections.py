"""The tables of a report, each with the words that say how to read it.

Knows nothing about plots, nor about the page around them.
"""

from __future__ import annotations

import html
import shlex
from collections.abc import Iterable, Sequence

from benchmarks.load.compare import FIGURES, agreements, comparisons
from benchmarks.load.load import Slo
from benchmarks.load.mix import spoken
from benchmarks.load.paired import Paired
from benchmarks.load.points import Point, Run, e2e, itl, tpot, ttft
from benchmarks.load.statistics import Estimate
from benchmarks.load.sweep import KNEE, Sweep, sweep
from benchmarks.load.table import estimate, hits, percentiles
from benchmarks.load.workload import CACHES, Workload


def ratios(found: Sequence[Point]) -> str:
    """Every arm against the first, load by load."""
    compared = comparisons(found)
    if not compared:
        return ""
    loads = list(dict.fromkeys((one.load, one.arm) for one in compared))
    rows = []
    for load, arm in loads:
        cells = {one.figure: one for one in compared if (one.load, one.arm) == (load, arm)}
        told = [_ratio(cells[name].ratio, cells[name].by_pass) for name in FIGURES]
        rows.append([load, arm, *told])
    against = html.escape(compared[0].against)
    return (
        f"<h2>Against {against}</h2><p>Ratio to {against}, request by request the same, with its "
        "95 % interval; in brackets the ratio of each pass alone. Below 1 is less. The interval "
        "covers which requests were drawn; how passes scatter it cannot know, so look at both.</p>"
        + _table(["load", "arm", *FIGURES], rows)
    )


def _ratio(of: Estimate | None, by_pass: Sequence[float]) -> str:
    if of is None:
        return "not valid"
    return f"{estimate(of, 1, 3)} [{', '.join(f'{one:.3f}' for one in by_pass)}]"


def sweeps(paired: Paired, found: Sequence[Point]) -> str:
    """The knee and the highest rate of each arm."""
    slo = paired.plan.slo
    arms = dict.fromkeys(point.arm for point in found if point.load.rate is not None)
    swept = [sweep([p for p in found if p.arm == arm], slo) for arm in arms]
    if not swept:
        return ""
    rows = [_swept(one) for one in swept]
    head = ["arm", "knee", "highest rate within the promise", "surely", "saturation"]
    return (
        f"<h2>Knee and highest rate</h2><p>Promise: {_told(slo)} for 99 % of requests. "
        f"Knee: the highest rate that is kept up with, median TTFT at most {KNEE:g} times "
        "that of the lowest valid rate. The highest rate is kept up with too. Rates in requests/s; "
        "only those that were tried, and two of them where a run between is not valid. "
        "&ldquo;Surely&rdquo; asks the upper end of the p99 interval.</p>" + _table(head, rows)
    )


def _swept(one: Sweep) -> list[str]:
    note = "reached" if one.saturated else "not reached: try higher rates"
    return [one.arm, str(one.knee), str(one.highest), str(one.surely), note]


def latencies(found: Sequence[Point]) -> str:
    """Times to the first token, all passes together."""
    rows = []
    for point in found:
        late = point.distribution(ttft)
        kept = point.goodput
        rows.append(
            [
                point.load.label,
                point.arm,
                "valid" if point.valid else "not valid",
                str(point.requests),
                percentiles(late) if late else "no answer",
                f"{point.completed:.2f}",
                estimate(kept, 100, 1) if kept else "",
            ]
        )
    head = ["load", "arm", "", "requests", "TTFT, ms", "completed/s", "goodput, %"]
    return (
        "<h2>Time to first token</h2><p>All passes together; in an open loop from the scheduled "
        "time. &dagger;: too few requests stand behind this percentile.</p>" + _table(head, rows)
    )


def decoding(found: Sequence[Point]) -> str:
    """What comes after the first token, and the whole."""
    rows = []
    for point in found:
        told = [point.distribution(values) for values in (itl, tpot, e2e)]
        cells = [percentiles(one) if one else "no answer" for one in told]
        rows.append([point.load.label, point.arm, "valid" if point.valid else "not valid", *cells])
    head = ["load", "arm", "", "ITL, ms", "TPOT, ms", "E2E, ms"]
    return (
        "<h2>After the first token</h2><p>ITL: gaps between deltas, which may hold more than one "
        "token. TPOT: by the server's count of tokens. E2E: to the last text.</p>"
        + _table(head, rows)
    )


def server(found: Sequence[Point]) -> str:
    """What /metrics and usage say."""
    rows = []
    for point in found:
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
                "not told" if kv is None else f"{100 * kv:.1f}",
                hits(first.metrics.mm_cache_hits, first.metrics.mm_cache_queries),
                hits(first.metrics.prefix_cache_hits, first.metrics.prefix_cache_queries),
            ]
        )
    head = [
        "load", "arm", "images/s", "output tokens/s", "prompt tokens", "visual tokens",
        "peak KV use, %", "image cache hits", "prefix cache hits (tokens)",
    ]  # fmt: skip
    return (
        "<h2>What the server says</h2><p>From its /metrics and usage, first pass; visual tokens as "
        "the plugin counts them, before and after. Token throughput is shown and never ranked by: "
        "pruning lowers it.</p>" + _table(head, rows)
    )


def same_answers(found: Sequence[Point]) -> str:
    """How often arms give one answer."""
    rows = [
        [one.load, one.arm, one.against, estimate(one.same, 100, 1) if one.same else ""]
        for one in agreements(found)
    ]
    if not rows:
        return ""
    return (
        "<h2>Same answers</h2><p>Share of requests with the same answer to the last letter, %. "
        "Greedy and of fixed length. It guards against speed from broken output, and is no "
        "accuracy.</p>" + _table(["load", "arm", "against", "same, %"], rows)
    )


def every_run(runs: Sequence[Run]) -> str:
    """Each run with its verdict."""
    rows = [
        [
            f"{run.number + 1}",
            run.arm,
            run.result.load.spoken(),
            run.result.verdict.spoken(),
            "; ".join(run.result.verdict.notes),
            f"{run.folder}/records.jsonl",
        ]
        for run in runs
    ]
    head = ["pass", "arm", "load", "verdict", "notes", "records"]
    return "<h2>Every run, in the order it was made</h2>" + _table(head, rows)


def setting(paired: Paired, runs: Sequence[Run]) -> str:
    """Command, arms, workload, machine."""
    arms = [
        [
            arm.name,
            (arm.digest or "none")[:16],
            arm.url or " ".join([arm.model, *arm.flags]),
            _server_told(arm.name, runs),
        ]
        for arm in paired.plan.arms
    ]
    rows = [[key, value] for key, value in _workload(paired.plan.workload)]
    rows += [[key, value] for key, value in (runs[0].result.environment.items() if runs else ())]
    busy = [run.result.environment["load average"] for run in runs]
    rows.append(["load average after each run", ", ".join(busy)])
    command = html.escape(shlex.join(paired.command))
    return (
        f"<h2>Setting</h2><p>Command:</p><pre>{command}</pre>"
        + _table(["arm", "digest of the state", "served as", "says it is"], arms)
        + _table(["", ""], rows)
    )


def _server_told(arm: str, runs: Sequence[Run]) -> str:
    told = next((run.result.server for run in runs if run.arm == arm), {})
    return ", ".join(f"{key} {value}" for key, value in told.items())


def _workload(workload: Workload) -> Iterable[tuple[str, str]]:
    yield "cache state", f"{workload.cache}: {CACHES[workload.cache]}"
    yield "requests", f"{workload.requests} a run, and {workload.warm_up} before the clock starts"
    yield "answers", f"{workload.output_tokens} tokens each, greedy"
    yield "longer side, pixels", spoken(workload.sides)
    yield "aspect", spoken(workload.aspects)
    yield "images a request", spoken(workload.images)
    yield "formats", spoken(workload.formats)
    yield "words in a question", spoken(workload.words)
    yield "seed", str(workload.seed)


def _told(slo: Slo) -> str:
    return html.escape(slo.spoken())


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{html.escape(c)}</{kind}>" for c in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="wide"><table>{line(head, "th")}{body}</table></div>'
