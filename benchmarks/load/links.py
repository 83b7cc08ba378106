"""Links from a report to the files of its runs, relative to the report's folder."""

from __future__ import annotations

from urllib.parse import quote

from benchmarks.load.points import Run
from benchmarks.load.result import RECORDS, RESULT


def records_link(run: Run) -> str:
    """The file that has every request of a run."""
    return quote(f"{run.folder}/{RECORDS}")


def result_link(run: Run) -> str:
    """The file that has the figures of a run."""
    return quote(f"{run.folder}/{RESULT}")
