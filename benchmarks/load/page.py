"""The report of a paired experiment: one HTML file that fetches nothing.

Knows nothing about how anything was measured.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from benchmarks.load import sections
from benchmarks.load.load import Load
from benchmarks.load.paired import Paired, read_paired
from benchmarks.load.plots import goodput_rate, rate_latency, throughput_latency, ttft_distribution
from benchmarks.load.points import Point, Run, points

REPORT = "report.html"
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write(folder: Path) -> Path:
    """``report.html`` from what lies in an experiment's folder; returns its path."""
    paired = read_paired(folder)
    runs = paired.runs(folder)
    path = folder / REPORT
    path.write_text(page(paired, runs))
    return path


def page(paired: Paired, runs: Sequence[Run]) -> str:
    """The whole document."""
    found = points(runs)
    told = "\n".join(
        part
        for part in (
            _verdict(paired, runs),
            sections.ratios(found),
            sections.sweeps(paired, found),
            _pictures(paired, found),
            sections.latencies(found),
            sections.decoding(found),
            sections.server(found),
            sections.same_answers(found),
            sections.every_run(runs),
            sections.setting(paired, runs),
        )
        if part
    )
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Load test</title>
<style>{_STYLE}</style>
<h1>Load test: {html.escape(", ".join(arm.name for arm in paired.plan.arms))}</h1>
{told}
</html>
"""


def _verdict(paired: Paired, runs: Sequence[Run]) -> str:
    bad = [run for run in runs if not run.result.verdict.valid]
    told = f"{len(runs) - len(bad)} of {len(runs)} runs are valid."
    lines = [f'<p class="{"bad" if bad or paired.broken else "good"}"><strong>{told}</strong> ']
    lines.append(
        "A run that is not valid is shown, hollow in the plots, and no ratio or rate is drawn "
        "from it.</p>"
    )
    if paired.broken:
        lines.append(f'<p class="bad">The experiment ended early: {html.escape(paired.broken)}</p>')
    return "".join(lines)


def _pictures(paired: Paired, found: Sequence[Point]) -> str:
    slo = paired.plan.slo
    figures = [("Throughput and latency", throughput_latency(found, slo))]
    if any(point.load.rate is not None for point in found):
        figures.append(("Latency over rate", rate_latency(found, slo)))
        figures.append(("Goodput over rate", goodput_rate(found)))
    load = _shared(found)
    if load is not None:
        chosen = [point for point in found if point.load == load]
        title = f"Distribution of TTFT, {load.spoken()}"
        figures.append((title, ttft_distribution(chosen)))
    told = "".join(
        f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}</figure>"
        for title, svg in figures
    )
    return f"<h2>Plots</h2><div class=plots>{told}</div>"


def _shared(found: Sequence[Point]) -> Load | None:
    """The highest load at which every arm is valid; else the highest that every arm has."""
    arms = {point.arm for point in found}
    common = [
        load
        for load in dict.fromkeys(point.load for point in found)
        if {p.arm for p in found if p.load == load} == arms
    ]
    valid = [load for load in common if all(p.valid for p in found if p.load == load)]
    best = valid or common
    return max(best, key=lambda load: (load.rate or 0, load.users or 0)) if best else None


_STYLE = """
:root{color-scheme:light;font:15px/1.5 system-ui,sans-serif;color:#1d2129}
body{max-width:76rem;margin:2rem auto;padding:0 1.5rem}
h1{font-size:1.6rem} h2{font-size:1.2rem;margin-top:2.2rem} p{max-width:60rem}
.good{border-left:4px solid #009e73;padding-left:.8rem}
.bad{border-left:4px solid #d55e00;padding-left:.8rem}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,32rem),1fr));gap:1.5rem}
figure{margin:0} figcaption{font-weight:600} svg{width:100%;height:auto}
.wide{overflow-x:auto} table{border-collapse:collapse;margin:.6rem 0;font-size:.86rem}
th,td{text-align:left;padding:.25rem .7rem;border-bottom:1px solid #e3e5e9;vertical-align:top}
th{border-bottom:2px solid #b9bec8} td{font-variant-numeric:tabular-nums}
td:first-child{white-space:nowrap}
pre{background:#f3f4f6;padding:.7rem;overflow-x:auto;white-space:pre-wrap}
"""
