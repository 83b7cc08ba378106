"""Run the self-test of one backbone on one model runner, in a process of its own.

Each run has its own process, because vLLM keeps engine state until its process ends, and because a
backbone that fails must not stop the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.selftest.report import Report

REPORT_PREFIX = "selftest-report:"

TIMEOUT = 900.0
"""Seconds that a backbone may take."""

RUNNER_SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
RUNNERS: Mapping[str, Mapping[str, str]] = {
    "v1": {RUNNER_SWITCH: "0"},
    "v2": {RUNNER_SWITCH: "1"},
}
"""vLLM's model runners: name -> environment in which vLLM uses it."""

_TRITON_PROBE = "from vllm.triton_utils import HAS_TRITON; print('triton:', HAS_TRITON)"

_ENGINE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class SelftestError(AutopruneError):
    """A tiny model could not be served; the message has the last output of its process."""


def available_runners() -> tuple[str, ...]:
    """Names of the model runners that vLLM can use here: V1 always, V2 only with Triton.

    Tested in a process of its own, because the import of vLLM initialises devices
    (``vllm.triton_utils.HAS_TRITON``, ``VllmConfig.use_v2_model_runner``).
    """
    process = subprocess.run(
        [sys.executable, "-c", _TRITON_PROBE],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return tuple(RUNNERS) if "triton: True" in process.stdout.splitlines() else ("v1",)


def run_backbone(
    name: str, environment: Mapping[str, str] | None = None, timeout: float = TIMEOUT
) -> Report:
    """The report of one backbone; raises :class:`SelftestError` if there is none."""
    try:
        process = subprocess.run(
            [sys.executable, "-m", "vllm_autoprune.selftest", name],
            env={**os.environ, **_ENGINE, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SelftestError(f"{name}: no report after {timeout:.0f} s") from None
    for line in reversed(process.stdout.splitlines()):
        if line.startswith(REPORT_PREFIX):
            return Report.model_validate_json(line.removeprefix(REPORT_PREFIX))
    tail = "\n".join((process.stdout + process.stderr).splitlines()[-30:])
    raise SelftestError(f"{name} ended with {process.returncode}:\n{tail}")
