"""vLLM's two model runners: how each is asked for, and which of them this machine has.

Knows nothing about what is served by them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
RUNNERS: Mapping[str, Mapping[str, str]] = {"v1": {SWITCH: "0"}, "v2": {SWITCH: "1"}}
"""By name, the environment in which vLLM uses it."""

_PROBE = "from vllm.triton_utils import HAS_TRITON; print('triton:', HAS_TRITON)"


def present() -> tuple[str, ...]:
    """The runners that vLLM can use here: V1 always, V2 where vLLM finds a usable Triton.

    Asked in a process of its own, because looking imports vLLM and initialises devices
    (``vllm.triton_utils.HAS_TRITON``, ``VllmConfig.use_v2_model_runner``).
    """
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=300, check=False
    )
    return tuple(RUNNERS) if "triton: True" in done.stdout.splitlines() else ("v1",)
