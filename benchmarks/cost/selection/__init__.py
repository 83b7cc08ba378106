"""`python -m benchmarks.cost selection`: time and memory of choosing which tokens are kept."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from benchmarks.cost.selection.timing import Settings

if TYPE_CHECKING:
    from benchmarks.common.report import Section

PARTS = ("selection", "memory", "share", "policies", "refinement", "batches")

NO_GPU = 2
"""Exit status where a GPU is required and there is none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; each has a default."""
    parser.add_argument(
        "device", nargs="?", default="cpu", choices=("cpu", "gpu"), help="where to measure"
    )
    parser.add_argument("--only", choices=PARTS, help="one part of the CPU measurements")
    parser.add_argument("--quick", action="store_true", help="small sizes, as a trial run")
    parser.add_argument("--json", action="store_true", help="print JSON (a GPU always does)")


def run(options: argparse.Namespace) -> int:
    """The exit status: 0 once everything is measured, whatever the verdicts."""
    return _run_on_gpu(options.quick) if options.device == "gpu" else _run_on_cpu(options)


def _run_on_gpu(quick: bool) -> int:
    from benchmarks.cost.selection import gpu

    reason = gpu.find_missing_requirement()
    if reason is not None:
        print(f"selection: {reason}", file=sys.stderr)
        return NO_GPU
    print(json.dumps(gpu.measure(quick), indent=1))
    return 0


def _run_on_cpu(options: argparse.Namespace) -> int:
    from benchmarks.common.report import markdown

    names = [options.only] if options.only else list(PARTS)
    sections = [_measure_part(name, Settings(options.quick)) for name in names]
    if options.json:
        print(json.dumps([asdict(section) for section in sections], indent=1))
    else:
        print(markdown(sections, "Selection"))
    return 0


def _measure_part(name: str, settings: Settings) -> Section:
    # Imported here, because measurements on a GPU need torch and triton only.
    from benchmarks.cost.selection import memory, policies, refinement, share, speed

    measure = {
        "selection": speed.measure,
        "memory": memory.measure,
        "share": share.measure,
        "policies": policies.measure,
        "refinement": refinement.measure,
        "batches": speed.measure_batches,
    }
    return measure[name](settings)
