"""`python -m benchmarks.ops`: arguments, what is measured, what is printed.

Knows nothing about how anything is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.ops.setting import Setting

if TYPE_CHECKING:
    from benchmarks.overhead.report import Section

PARTS = ("selection", "memory", "share", "refinement", "batches")

NO_GPU = 2
"""Exit status where a GPU is asked for and there is none."""


def parser() -> argparse.ArgumentParser:
    """The options; each has a default."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.ops",
        description="Measure selection side by side with what it has to beat.",
    )
    made.add_argument("device", nargs="?", default="cpu", choices=("cpu", "gpu"))
    made.add_argument("--only", choices=PARTS, help="one part of the CPU's run")
    made.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    made.add_argument("--json", action="store_true", help="print JSON (a GPU's run always does)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 once everything is measured, whatever the verdicts."""
    options = parser().parse_args(arguments)
    return _gpu(options.quick) if options.device == "gpu" else _cpu(options)


def _gpu(quick: bool) -> int:
    """Needs torch and triton, and nothing else that pip would have to bring."""
    from benchmarks.ops import gpu

    reason = gpu.missing()
    if reason is not None:
        print(f"benchmarks.ops: {reason}", file=sys.stderr)
        return NO_GPU
    print(json.dumps(gpu.measure(quick), indent=1))
    return 0


def _part(name: str, setting: Setting) -> Section:
    """Imported only now: a GPU's run does without what these need."""
    from benchmarks.ops import against_published, batches, memory, refinement, share

    measure = {
        "selection": against_published.measure,
        "memory": memory.measure,
        "share": share.measure,
        "refinement": refinement.measure,
        "batches": batches.measure,
    }
    return measure[name](setting)


def _cpu(options: argparse.Namespace) -> int:
    from benchmarks.overhead.report import markdown

    setting = Setting(options.quick)
    names = [options.only] if options.only else list(PARTS)
    sections = [_part(name, setting) for name in names]
    if options.json:
        print(json.dumps([dataclasses.asdict(section) for section in sections], indent=1))
    else:
        print(markdown(sections, "Selection"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
