"""Runs of a suite: the protocol of suites, their progress, and the report files.

Whatever ends a run, the answers recorded until then are kept, and the report tells whether they are
valid.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.html import as_html
from vllm_autoprune.evaluation.journal import JOURNAL, Contents, Journal
from vllm_autoprune.evaluation.pages import as_latex, as_markdown
from vllm_autoprune.evaluation.records import Case, EvaluationError, Setup
from vllm_autoprune.evaluation.report import Report, build_report

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Share, speed and remaining time of a run; ``write`` gets a line at most every ten seconds."""

    def __init__(
        self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.write = write
        self._clock = clock
        self._total = self._done = self._earlier = 0
        self._started = self._written = clock()

    def begin(self, total: int, earlier: int = 0) -> None:
        """Start the clock; ``earlier`` items of the total are left out of the speed."""
        self._total, self._earlier, self._done = total, earlier, earlier
        self._started = self._written = self._clock()
        if earlier:
            self.write(f"{earlier:,} of {total:,} are recorded already")

    def advance(self, count: int = 1) -> None:
        """Count items as done."""
        self._done += count
        now = self._clock()
        if now - self._written >= _SECONDS_BETWEEN_LINES or self._done == self._total:
            self._written = now
            self.write(self._line(now - self._started))

    def _line(self, elapsed: float) -> str:
        rate = (self._done - self._earlier) / max(elapsed, 1e-9)
        left = (self._total - self._done) / max(rate, 1e-9)
        remaining = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min"
        share = self._done / self._total
        return f"{share:4.0%}  {self._done:,} of {self._total:,}, {rate:.2g}/s, {remaining} left"


class Suite(Protocol):
    """A set of questions for one model, to be answered in several cases."""

    @property
    def setup(self) -> Setup:
        """Model, data and settings that the measurements belong to."""

    @property
    def cases(self) -> Sequence[Case]:
        """Every way to serve the questions; one of them is the full model."""

    def plan(self) -> Sequence[str]:
        """Describe what will be run, without starting anything."""

    def measure(self, journal: Journal, progress: Progress) -> None:
        """Add to the journal what it lacks.

        Raises :class:`ConfigError` if it cannot start and :class:`EvaluationError` if it cannot
        continue; the journal keeps the answers until then.
        """

    def objections(self, contents: Contents) -> Sequence[str]:
        """Reasons against complete answers, beyond those that every suite has."""


def evaluate(suite: Suite, folder: Path, *, resume: bool, progress: Progress) -> Report:
    """Measure what is missing and write the report files.

    Raises :class:`ConfigError` or :class:`EvaluationError` if the evaluation cannot start.
    """
    path = folder / JOURNAL
    if not resume and path.exists() and path.stat().st_size:
        what, fix = "already contains an evaluation", "add --resume, or name another folder"
        raise ConfigError("eval", [Problem(f"--out {folder}", what, fix)])
    with Journal(path) as journal:
        journal.begin(suite.setup)
        journal.append(suite.cases)
        interruptions: list[str] = []
        try:
            suite.measure(journal, progress)
        except EvaluationError as error:
            interruptions.append(f"stopped: {error}")
        except ConfigError:
            if not (journal.contents.answers or journal.contents.totals):
                path.unlink()  # else the corrected command would have to say --resume
            raise
        contents = journal.contents
        report = build_report(contents, [*interruptions, *suite.objections(contents)])
    write_report(report, folder)
    return report


def write_report(report: Report, folder: Path) -> None:
    """Write the report as JSON, HTML, Markdown and LaTeX; raises :class:`EvaluationError`."""
    try:
        (folder / "report.json").write_text(as_json(report) + "\n")
        (folder / "report.html").write_text(as_html(report))
        (folder / "report.md").write_text(as_markdown(report))
        (folder / "report.tex").write_text(as_latex(report))
    except OSError as error:
        raise EvaluationError(
            f"{folder}: {error.strerror} -> free some space; {JOURNAL} is kept, and --resume "
            "writes the report from it"
        ) from None


def as_json(report: Report) -> str:
    """The report without the states that were sent in requests, which the journal contains."""
    content = report.model_dump(
        mode="json",
        exclude={"rows": {"__all__": {"case": {"pruning"}}}, "refused": {"__all__": {"pruning"}}},
    )
    return json.dumps({"valid": report.valid, **content}, indent=1)
