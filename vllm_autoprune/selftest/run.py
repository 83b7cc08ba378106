"""Runs one backbone in a process of its own, and brings its report back.

Knows nothing about what the report should say. A process each, because vLLM keeps much of an
engine for the life of its process, and because a backbone that fails must not stop the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.selftest.report import Report

MARK = "selftest-report:"

PATIENCE = 900.0
"""Seconds that a backbone may take."""

_ENGINE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class SelftestError(AutopruneError):
    """A tiny model could not be served at all; the message is what its process said last."""


def examine(
    name: str, environment: Mapping[str, str] | None = None, patience: float = PATIENCE
) -> Report:
    """The report of one backbone; raises SelftestError where there is none."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "vllm_autoprune.selftest", name],
            env={**os.environ, **_ENGINE, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=patience,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SelftestError(f"{name}: no report after {patience:.0f} s") from None
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(MARK):
            return Report.model_validate_json(line.removeprefix(MARK))
    tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
    raise SelftestError(f"{name} ended with {done.returncode}:\n{tail}")
