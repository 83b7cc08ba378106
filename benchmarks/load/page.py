"""The report of a paired experiment: one HTML file that loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from benchmarks.load.paired import Paired, read_paired
from benchmarks.load.plots import goodput_rate, rate_latency, throughput_latency, ttft_distribution
from benchmarks.load.points import Point, Run, group_runs
from benchmarks.load.schedule import Load
from benchmarks.load.sections import sections, settings

REPORT = "report.html"


def write_report(folder: Path) -> Path:
    """Write ``report.html`` from an experiment's folder; returns its path."""
    paired = read_paired(folder)
    path = folder / REPORT
    path.write_text(render_page(paired, paired.runs(folder)))
    return path


def render_page(paired: Paired, runs: Sequence[Run]) -> str:
    """The whole document."""
    points = group_runs(runs)
    invalid = sum(not run.result.verdict.valid for run in runs)
    text = _PAGE.render(
        arms=", ".join(arm.name for arm in paired.plan.arms),
        valid=len(runs) - invalid,
        total=len(runs),
        bad=bool(invalid or paired.broken),
        broken=paired.broken,
        sections=sections(paired, runs, points),
        plots=_draw_plots(paired, points),
        settings=settings(paired, runs),
    )
    return text + "\n"


def _draw_plots(paired: Paired, points: Sequence[Point]) -> list[tuple[str, Markup]]:
    slo = paired.plan.slo
    plots = [("Throughput and latency", throughput_latency(points, slo))]
    if any(point.load.rate is not None for point in points):
        plots.append(("Latency over rate", rate_latency(points, slo)))
        plots.append(("Goodput over rate", goodput_rate(points)))
    load = _choose_common_load(points)
    if load is not None:
        chosen = [point for point in points if point.load == load]
        plots.append((f"Distribution of TTFT, {load.describe()}", ttft_distribution(chosen)))
    return [(title, Markup(svg)) for title, svg in plots]


def _choose_common_load(points: Sequence[Point]) -> Load | None:
    """The highest load at which every arm is valid; else the highest that every arm has."""
    arms = {point.arm for point in points}
    common = [
        load
        for load in dict.fromkeys(point.load for point in points)
        if {p.arm for p in points if p.load == load} == arms
    ]
    valid = [load for load in common if all(p.valid for p in points if p.load == load)]
    best = valid or common
    return max(best, key=lambda load: (load.rate or 0, load.users or 0)) if best else None


_PAGE = jinja2.Environment(autoescape=True, trim_blocks=True).from_string("""\
{% macro show(section) %}
<h2>{{ section.title }}</h2>
{% if section.text %}<p>{{ section.text }}</p>{% endif %}
{{ section.table.html()|safe }}
{% endmacro %}
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Load test</title>
<style>
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
</style>
<h1>Load test: {{ arms }}</h1>
<p class="{{ "bad" if bad else "good" }}">
<strong>{{ valid }} of {{ total }} runs are valid.</strong>
A run that is not valid is shown (hollow in the plots), but used for no ratio and no rate.</p>
{% if broken %}
<p class="bad">The experiment ended early: {{ broken }}</p>
{% endif %}
{% for section in sections.before_plots %}{{ show(section) }}{% endfor %}
<h2>Plots</h2><div class=plots>
{% for title, svg in plots %}
<figure><figcaption>{{ title }}</figcaption>{{ svg }}</figure>
{% endfor %}
</div>
{% for section in sections.after_plots %}{{ show(section) }}{% endfor %}
<h2>Settings</h2><p>Command:</p><pre>{{ settings.command }}</pre>
{% for table in settings.tables %}{{ table.html()|safe }}
{% endfor %}
</html>
""")
