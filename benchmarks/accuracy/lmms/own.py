"""Tasks of a folder that lmms-eval is told to include, as benchmarks.

Knows nothing about what is asked in them. Their first metric counts, which has to be the mean of
scores between 0 and 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accuracy.lmms.benchmarks import Benchmark
from vllm_autoprune.errors import ConfigError, Problem

_TASK = re.compile(r"""^task:\s*["']?(?P<name>[\w.-]+)["']?\s*$""", re.MULTILINE)


def own_tasks(folder: Path) -> Sequence[Benchmark]:
    """Every task that a YAML file below ``folder`` declares; raises :class:`ConfigError`.

    Files are searched, not parsed: lmms-eval's YAML has tags that name functions.
    """
    names = [
        match["name"]
        for path in sorted(folder.rglob("*.yaml"))
        if (match := _TASK.search(path.read_text(encoding="utf-8")))
    ]
    if not names:
        what, fix = "holds no task", "name a folder with a YAML file that says `task: NAME`"
        raise ConfigError("eval", [Problem(f"--include-path {folder}", what, fix)])
    return [Benchmark(name, name, ()) for name in names]
