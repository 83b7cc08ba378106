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
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

Report = Any
"""Plain JSON; each scenario's docstring says what is in it."""

Outcome = tuple[Report, str | None]
"""A report, or why there is none."""

SCENARIOS: dict[str, Callable[[], Report]] = {}

PATIENCE = 400.0
"""Seconds that a scenario may take."""

MARK = "scenario-report:"

POOL = ThreadPoolExecutor(min(2, len(os.sched_getaffinity(0))), thread_name_prefix="engine")
"""Engines that run at once: an engine on a tiny model keeps one core busy."""


def scenario(function: Callable[[], Report]) -> Callable[[], Report]:
    """Enter a scenario under its own name."""
    SCENARIOS[function.__name__] = function
    return function


def run(
    name: str, environment: Mapping[str, str] | None = None, patience: float = PATIENCE
) -> Report:
    """The report of a scenario, run once a test session and environment."""
    report, failure = begin(name, environment, patience).result()
    assert failure is None, failure
    return report


def begin(
    name: str, environment: Mapping[str, str] | None = None, patience: float = PATIENCE
) -> Future[Outcome]:
    """Start a scenario that somebody will want the report of, beside one that is running."""
    return _begun(name, tuple(sorted((environment or {}).items())), patience)


@cache
def _begun(name: str, environment: tuple[tuple[str, str], ...], patience: float) -> Future[Outcome]:
    # A failure is remembered too: every test of the scenario would wait for it again.
    return POOL.submit(_outcome, name, dict(environment), patience)


def _outcome(name: str, environment: Mapping[str, str], patience: float) -> Outcome:
    done = subprocess.run(
        [sys.executable, "-m", "tests.serving.scenarios", name],
        cwd=Path(__file__).resolve().parents[3],
        env=_environment(environment),
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
