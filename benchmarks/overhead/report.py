"""Sections of the report: claims with figures and verdicts, tables; as JSON and as Markdown.

Knows nothing about how anything was measured.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.overhead.statistics import Estimate, Spread, Verdict

ORDER = ("ttft", "inert", "memory", "second-question")


@dataclass(frozen=True)
class Claim:
    """A promise, what was measured, and whether it holds."""

    promise: str
    measured: str
    verdict: Verdict


@dataclass(frozen=True)
class Table:
    """A caption, column names and rows of text."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """One part of the report; ``data`` holds every single measured value."""

    name: str
    title: str
    setup: Sequence[str]
    claims: Sequence[Claim]
    tables: Sequence[Table]
    data: Mapping[str, object]
    environment: Mapping[str, str] = field(default_factory=lambda: environment())


def environment() -> dict[str, str]:
    """Where the figures come from."""
    names = ("vllm", "vllm-autoprune", "torch", "transformers")
    versions = {name: importlib.metadata.version(name) for name in names}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f"{os.getloadavg()[0]:.2f}"
    return {
        **versions,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": str(cores),
        "load at the end": load,
    }


def percent(estimate: Estimate) -> str:
    """A ratio as what it is more than 1."""
    value, low, high = (f"{100 * (x - 1):+.1f}" for x in dataclasses.astuple(estimate))
    return f"{value} % (95 %: {low} to {high})"


def milliseconds(estimate: Estimate) -> str:
    """A difference in seconds."""
    value, low, high = (f"{1000 * x:+.0f}" for x in dataclasses.astuple(estimate))
    return f"{value} ms (95 %: {low} to {high})"


def quartiles(of: Spread) -> str:
    """A sample in seconds: median and quartiles, in milliseconds."""
    return f"{1000 * of.median:.1f} ({1000 * of.low:.1f}–{1000 * of.high:.1f})"


def write(section: Section, out: Path) -> None:
    """`NAME.json`, and `summary.md` over all sections that lie in the folder."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(section), indent=1, sort_keys=True)
    (out / f"{section.name}.json").write_text(text + "\n")
    found = [out / f"{name}.json" for name in ORDER]
    sections = [_read(path) for path in found if path.is_file()]
    (out / "summary.md").write_text(markdown(sections))


def _read(path: Path) -> Section:
    raw = json.loads(path.read_text())
    raw["claims"] = [Claim(**claim) for claim in raw["claims"]]
    raw["tables"] = [Table(**table) for table in raw["tables"]]
    return Section(**raw)


def markdown(sections: Iterable[Section], title: str = "What pruning itself costs") -> str:
    """The whole report."""
    parts = [f"# {title}\n"]
    for section in sections:
        parts.append(f"## {section.title}\n")
        parts.append("\n".join(f"* {line}" for line in section.setup) + "\n")
        claims = [(c.promise, c.measured, f"**{c.verdict}**") for c in section.claims]
        parts.append(_grid(("promise", "measured", "verdict"), claims))
        for table in section.tables:
            parts.append(f"{table.caption}\n")
            parts.append(_grid(table.columns, table.rows))
        told = ", ".join(f"{key} {value}" for key, value in section.environment.items())
        parts.append(f"Environment: {told}.\n")
    return "\n".join(parts)


def _grid(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
