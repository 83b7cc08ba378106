"""Reports: claims with verdicts, tables, environment; as JSON, Markdown and HTML."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.pages.table import Table as Table  # exported from here too
from vllm_autoprune.statistics import Estimate, Spread, Verdict

MIB = 1 << 20


@dataclass(frozen=True)
class Claim:
    """A promise, what was measured, and whether it holds."""

    promise: str
    measured: str
    verdict: Verdict


@dataclass(frozen=True)
class Section:
    """One part of a report; ``data`` holds every single measured value."""

    name: str
    title: str
    setup: Sequence[str]
    claims: Sequence[Claim]
    tables: Sequence[Table]
    data: Mapping[str, object]
    environment: Mapping[str, str] = field(default_factory=lambda: environment())

    def markdown(self) -> str:
        """Setup, claims with their verdicts, tables, environment."""
        parts = [f"## {self.title}\n", "\n".join(f"* {line}" for line in self.setup) + "\n"]
        claims = [(c.promise, c.measured, f"**{c.verdict}**") for c in self.claims]
        parts.append(Table("", ("promise", "measured", "verdict"), claims).markdown() + "\n")
        for table in self.tables:
            parts += [f"{table.caption}\n", table.markdown() + "\n"]
        return "\n".join([*parts, f"Environment: {format_environment(self.environment)}.\n"])


def markdown(sections: Iterable[Section], title: str) -> str:
    """A whole report."""
    return "\n".join([f"# {title}\n", *(section.markdown() for section in sections)])


def environment() -> dict[str, str]:
    """Versions, machine and load average, on which figures depend."""
    versions = {}
    for name in ("vllm", "vllm-autoprune", "torch", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        **versions,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": str(cores),
        "load average": f"{os.getloadavg()[0]:.2f}",
        "dtype of local servers": choose_dtype(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def format_environment(values: Mapping[str, str]) -> str:
    """One line."""
    return ", ".join(f"{key} {value}" for key, value in values.items())


def command_line() -> tuple[str, ...]:
    """The command line of this process."""
    spec = sys.modules["__main__"].__spec__
    if spec is None:
        return tuple(sys.argv)
    return ("python", "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:])


def format_estimate(
    estimate: Estimate, unit: float = 1.0, digits: int = 1, between: str = "–"
) -> str:
    """A figure and its interval, such as ``1.2 (1.1–1.3)``, multiplied by ``unit``."""
    value, low, high = (f"{unit * x:.{digits}f}" for x in dataclasses.astuple(estimate))
    return f"{value} ({low}{between}{high})"


def format_excess(ratio: Estimate) -> str:
    """A ratio as the per cent by which it differs from 1."""
    value, low, high = (f"{100 * (x - 1):+.1f}" for x in dataclasses.astuple(ratio))
    return f"{value} % (95 %: {low} to {high})"


def format_spread(sample: Spread, unit: float = 1000.0) -> str:
    """Median and quartiles; of seconds, in milliseconds, without decimals from 1,000 on."""
    digits = 0 if unit * sample.median >= 1000 else 1
    median, low, high = (
        f"{unit * figure:,.{digits}f}" for figure in (sample.median, sample.low, sample.high)
    )
    return f"{median} ({low}–{high})"
