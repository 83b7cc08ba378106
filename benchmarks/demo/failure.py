"""One-line messages for failures of the demo."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.common import BenchmarkError
from vllm_autoprune import AutopruneError


def describe_failure(error: BaseException) -> str:
    """What went wrong, without a traceback."""
    if isinstance(error, AutopruneError):
        return " ".join(str(error).split())
    return f"{type(error).__name__}: {error}"


def build_start_error(log: Path) -> BenchmarkError:
    """Why a server did not start, from its log."""
    text = log.read_text(errors="replace")
    return BenchmarkError(f"the server did not start: {find_root_cause(text)} (log: {log})")


def find_root_cause(log: str) -> str:
    """The plugin's refusal, else the first error in a log, else its last line.

    Processes pass errors on, so the first one is the cause.
    """
    _, refused, refusal = log.partition("\nvllm-autoprune: ")
    if refused:
        return " ".join(refusal.split())
    first = re.search(r"(?:^|\] )(\w*(?:Error|Exception): .*)$", log, re.MULTILINE)
    lines = log.split("\n")
    return first[1] if first else next((x for x in reversed(lines) if x.strip()), "no output")
