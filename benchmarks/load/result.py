"""The whole of one run as a file: settings, verdict, figures, server, machine, command.

Knows nothing about how it was measured.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from benchmarks.load.errors import LoadError
from benchmarks.load.facts import RunFacts
from benchmarks.load.first import priority
from benchmarks.load.load import Load, Slo
from benchmarks.load.plain import Plain
from benchmarks.load.server_metrics import ServerMetrics
from benchmarks.load.summary import Summary
from benchmarks.load.verdict import Verdict
from benchmarks.load.workload import Workload

RESULT, RECORDS = "run.json", "records.jsonl"


class Result(Plain):
    """One run. Its records lie beside it in ``records.jsonl``."""

    label: str
    url: str
    began: str
    """UTC, ISO 8601."""
    workload: Workload
    workload_digest: str
    load: Load
    slo: Slo
    verdict: Verdict
    summary: Summary
    metrics: ServerMetrics
    facts: RunFacts
    server: Mapping[str, str] = {}
    """What the server says it is."""
    environment: Mapping[str, str]
    """Of the client."""
    command: tuple[str, ...]

    def write(self, folder: Path) -> None:
        """As ``run.json``; raises OSError where the disk does not take it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULT).write_text(self.model_dump_json(indent=1) + "\n")


def read_result(folder: Path) -> Result:
    """The run in a folder; raises :class:`LoadError` where there is none."""
    try:
        return Result.model_validate_json((folder / RESULT).read_text())
    except (OSError, ValidationError) as error:
        raise LoadError(f"{folder / RESULT}: {str(error).splitlines()[0]}") from error


def environment() -> dict[str, str]:
    """Where figures come from: versions, machine, and how busy it was."""
    found = {}
    for name in ("vllm", "vllm-autoprune", "torch", "transformers", "locust", "gevent"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        **found,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": str(cores),
        "load average": f"{os.getloadavg()[0]:.2f}",
        "priority": priority(),
    }


def command() -> tuple[str, ...]:
    """How this process was called, as one would type it again."""
    spec = sys.modules["__main__"].__spec__
    if spec is None:
        return tuple(sys.argv)
    return ("python", "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or "unknown"
