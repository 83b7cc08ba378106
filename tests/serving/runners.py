"""vLLM's two model runners, and the environment variables that select them.

On a CPU, V2 runs by Triton's interpreter (``interpreter/README.md``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.serving.scenarios import PATIENCE, Report, begin, run
from vllm_autoprune.selftest.run import RUNNERS
from vllm_autoprune.selftest.run import Report as SelftestReport

# Without these vLLM binds the threads of every engine to the same cores.
_ONE_CORE = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_INTERPRETER = str(Path(__file__).with_name("interpreter"))
_INTERPRETED = {
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [_INTERPRETER, os.getenv("PYTHONPATH")])),
}
ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "v1": {**_ONE_CORE, **RUNNERS["v1"]},
    "v2": {**_ONE_CORE, **RUNNERS["v2"], **_INTERPRETED},
}


@dataclass(frozen=True)
class Runner:
    """One of the two model runners."""

    name: str

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment of a process that uses this runner."""
        return ENVIRONMENTS[self.name]

    def begin(self, scenario: str) -> None:
        """Start a scenario; a later test reads its report."""
        begin(scenario, self.environment)

    def run(
        self, scenario: str, more: Mapping[str, str] | None = None, patience: float = PATIENCE
    ) -> Report:
        """The report of a scenario, in a separate process if there are ``more`` variables."""
        return run(scenario, {**self.environment, **(more or {})}, patience)

    def examine(self, backbone: str) -> SelftestReport:
        """The selftest's report of a backbone."""
        return SelftestReport.model_validate(self.run(f"selftest:{backbone}"))
