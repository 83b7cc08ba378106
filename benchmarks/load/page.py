"""The report of a paired experiment: one HTML file that loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load.answer import Answer, answer_question
from benchmarks.load.export import POINTS_CSV, summarize_experiment, write_points_csv
from benchmarks.load.paired import Paired, read_paired
from benchmarks.load.plots import draw_charts
from benchmarks.load.points import Point, Run, group_runs
from benchmarks.load.sections import (
    build_agreement,
    build_decoding,
    build_latencies,
    build_ratios,
    build_runs,
    build_server_figures,
    build_settings,
    build_sweeps,
)
from benchmarks.load.settings import CACHES
from vllm_autoprune.pages.document import Document, Section, render_document

REPORT = "report.html"


@dataclass(frozen=True)
class WrittenReport:
    """A report that has been written: its path, its answer, and its figures as JSON."""

    path: Path
    answer: Answer
    summary: dict[str, object]


def write_report(folder: Path) -> WrittenReport:
    """Write ``report.html`` and ``points.csv`` from an experiment's folder."""
    paired = read_paired(folder)
    runs = paired.runs(folder)
    points = sorted(group_runs(runs), key=_order)
    answer = answer_question(points, paired.plan.slo, paired.broken)
    path = folder / REPORT
    path.write_text(render_document(build_document(paired, runs, points, answer)))
    write_points_csv(points, folder / POINTS_CSV)
    return WrittenReport(path, answer, summarize_experiment(points, answer, path))


def build_document(
    paired: Paired, runs: Sequence[Run], points: Sequence[Point], answer: Answer
) -> Document:
    """The whole report."""
    return Document(
        title=f"Load test: {', '.join(arm.name for arm in paired.plan.arms)}",
        answer=answer.sentence,
        tone=answer.tone,
        warnings=answer.limits,
        facts=_list_facts(paired, runs),
        sections=[section for section in _sections(paired, runs, points) if _has_content(section)],
    )


def _sections(paired: Paired, runs: Sequence[Run], points: Sequence[Point]) -> list[Section]:
    return [
        Section(
            "Charts",
            [
                "Bars: 95 % intervals; hollow: not valid. Point at a mark for its figures, click "
                "it for its records, click an entry of the legend to hide it."
            ],
            charts=draw_charts(points, paired.plan.slo) if points else [],
        ),
        build_ratios(points),
        build_sweeps(paired, points),
        build_latencies(points),
        build_decoding(points),
        build_server_figures(points),
        build_agreement(points),
        build_runs(runs),
        build_settings(paired, runs),
    ]


def _order(point: Point) -> tuple[bool, float, float]:
    """Closed loops before open ones, each by load; arms of one load stay in their order."""
    load = point.load
    return load.rate is not None, load.users or 0, load.rate or 0.0


def _has_content(section: Section) -> bool:
    return bool(section.tables or section.charts)


def _list_facts(paired: Paired, runs: Sequence[Run]) -> list[str]:
    valid = sum(run.result.verdict.valid for run in runs)
    requests = sum(run.result.summary.requests for run in runs)
    plan = paired.plan
    return [
        f"{valid} of {len(runs)} runs are valid",
        f"{requests:,} requests counted",
        f"{plan.passes} passes",
        f"objective: {plan.slo.describe()}",
        CACHES[plan.workload.cache],
    ]
