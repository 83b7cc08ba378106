"""Shared parts of benchmark reports: environment, command, figures as text, progress on stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.statistics import Estimate, Spread

MIB = 1 << 20

_BEGIN = time.monotonic()


def environment(*packages: str) -> dict[str, str]:
    """Versions (also of ``packages``), machine and load average, on which figures depend."""
    versions = {}
    for name in ("vllm", "vllm-autoprune", "torch", "transformers", *packages):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    processor = platform.processor() or "unknown"
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [
            line.partition(":")[2].strip()
            for line in lines
            if line.startswith("model name")
        ]
        processor = (*names, processor)[0]
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count()
    )
    return {
        **versions,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": processor,
        "cores": str(cores),
        "load average": f"{os.getloadavg()[0]:.2f}",
        "dtype of local servers": choose_dtype(),
    }


def format_environment() -> str:
    """The result of :func:`environment` as a sentence."""
    values = ", ".join(f"{key} {value}" for key, value in environment().items())
    return f"Environment: {values}."


def command_line() -> tuple[str, ...]:
    """The command line of this process without API keys."""
    spec = sys.modules["__main__"].__spec__
    program = (
        ["python", "-m", spec.name.removesuffix(".__main__")] if spec else sys.argv[:1]
    )
    text = "\0".join([*program, *sys.argv[1:]])
    return tuple(
        re.sub("(\0--(?:api-key|header)[\0=])[^\0]*", r"\1***", text).split("\0")
    )


def read_commit(*paths: str) -> str:
    """Last commit that changed any of these paths of the repository, in eight digits."""
    call = ["git", "log", "-1", "--format=%h", "--abbrev=8", "--", *paths]
    root = Path(__file__).resolve().parents[2]
    return subprocess.check_output(call, cwd=root, text=True).strip()


def format_estimate(
    estimate: Estimate, unit: float = 1.0, digits: int = 1, between: str = "–"
) -> str:
    """A figure and its interval, such as ``1.2 (1.1–1.3)``, multiplied by ``unit``."""
    value, low, high = (f"{unit * x:.{digits}f}" for x in dataclasses.astuple(estimate))
    return f"{value} ({low}{between}{high})"


def format_spread(sample: Spread) -> str:
    """Median and quartiles, seconds as milliseconds; values from 1,000 on have no decimals."""
    digits = 0 if sample.median >= 1 else 1
    median, low, high = (
        f"{1000 * x:,.{digits}f}" for x in (sample.median, sample.low, sample.high)
    )
    return f"{median} ({low}–{high})"


def log_progress(line: str) -> None:
    """Print one line with the seconds since the start of this process."""
    print(f"[{time.monotonic() - _BEGIN:6.1f} s] {line}", file=sys.stderr, flush=True)
