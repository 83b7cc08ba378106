"""Running a suite: journal, measurement, verdict, and the files that are left.

Knows nothing about the suite. Whatever ends a measurement, what it has recorded is kept, and the
report says what it is worth.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.accuracy.errors import EvaluationError
from benchmarks.accuracy.journal import JOURNAL, Journal
from benchmarks.accuracy.pages import as_latex, as_markdown
from benchmarks.accuracy.progress import Progress
from benchmarks.accuracy.report import Report
from benchmarks.accuracy.suite import Suite
from benchmarks.accuracy.summary import summarize
from vllm_autoprune.errors import ConfigError, Problem


def evaluate(suite: Suite, folder: Path, *, resume: bool, progress: Progress) -> Report:
    """Measure what is missing and write the report.

    Raises :class:`ConfigError` or :class:`EvaluationError` where nothing can begin.
    """
    path = folder / JOURNAL
    if not resume and path.exists() and path.stat().st_size:
        what, fix = "holds an evaluation already", "add --resume, or name another folder"
        raise ConfigError("eval", [Problem(f"--out {folder}", what, fix)])
    with Journal(path) as journal:
        journal.open_as(suite.opened)
        journal.put(suite.cases)
        stopped: list[str] = []
        try:
            suite.measure(journal, progress)
        except EvaluationError as error:
            stopped.append(f"stopped: {error}")
        contents = journal.contents
        report = summarize(contents, [*stopped, *suite.objections(contents)])
    write(report, folder)
    return report


def write(report: Report, folder: Path) -> None:
    """``report.json``, ``report.md`` and ``report.tex``; raises :class:`EvaluationError`."""
    try:
        (folder / "report.json").write_text(as_json(report) + "\n")
        (folder / "report.md").write_text(as_markdown(report))
        (folder / "report.tex").write_text(as_latex(report))
    except OSError as error:
        raise EvaluationError(
            f"{folder}: {error.strerror} -> make room; {JOURNAL} is kept, and --resume makes the "
            "report of it"
        ) from None


def as_json(report: Report) -> str:
    """The report without the states that requests brought: those are in the journal."""
    told = report.model_dump(
        mode="json",
        exclude={"rows": {"__all__": {"case": {"asked"}}}, "refused": {"__all__": {"asked"}}},
    )
    return json.dumps({"valid": report.valid, **told}, indent=1)
