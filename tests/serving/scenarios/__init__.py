"""Scenarios on a real engine, each run in a process of its own by :func:`run`.

Knows nothing about what is right: a scenario reports what happened, tests judge it.

``python -m tests.serving.scenarios NAME`` prints one line of JSON, last.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

Report = Any
"""Plain JSON; each scenario's docstring says what is in it."""

SCENARIOS: dict[str, Callable[[], Report]] = {}

PATIENCE = 400.0
"""Seconds that a scenario may take."""

MARK = "scenario-report:"

_INTERPRETER = Path(__file__).resolve().parents[1] / "interpreter"
V2 = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(_INTERPRETER), os.getenv("PYTHONPATH")])),
}
"""An environment in which vLLM's model runner V2 runs on a CPU."""


def scenario(function: Callable[[], Report]) -> Callable[[], Report]:
    """Enter a scenario under its own name."""
    SCENARIOS[function.__name__] = function
    return function


def run(
    name: str, environment: Mapping[str, str] | None = None, patience: float = PATIENCE
) -> Report:
    """The report of a scenario, run once a test session and environment."""
    report, failure = _outcome(name, tuple(sorted((environment or {}).items())), patience)
    assert failure is None, failure
    return report


@cache
def _outcome(
    name: str, environment: tuple[tuple[str, str], ...], patience: float
) -> tuple[Report, str | None]:
    # A failure is remembered too: every test of the scenario would wait for it again.
    done = subprocess.run(
        [sys.executable, "-m", "tests.serving.scenarios", name],
        cwd=Path(__file__).resolve().parents[3],
        env=_environment(dict(environment)),
        capture_output=True,
        text=True,
        timeout=patience,
        check=False,
    )
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK)), None
    tail = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
    return None, f"scenario {name} ended with {done.returncode}:\n{tail}"


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    engine = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    return {**os.environ, **engine, **extra}
