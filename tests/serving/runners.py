"""vLLM's two model runners, each in the environment in which tests serve by it.

Knows nothing about what is served. On a CPU, V2 runs by Triton's interpreter
(``interpreter/README.md``). What one is asked is begun for the other as well, where this session
asks it too: on two cores both take little longer than one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.serving.scenarios import PATIENCE, POOL, Report, begin, run
from vllm_autoprune.selftest import report
from vllm_autoprune.selftest import run as selftest
from vllm_autoprune.selftest.runners import RUNNERS

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
    """One of them; ``asked`` has the names of those that this test session asks for."""

    name: str
    asked: frozenset[str] = frozenset(ENVIRONMENTS)

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process that serves by it is started with."""
        return ENVIRONMENTS[self.name]

    def run(
        self, scenario: str, more: Mapping[str, str] | None = None, patience: float = PATIENCE
    ) -> Report:
        """The report of a scenario."""
        for name in self.asked:
            begin(scenario, {**ENVIRONMENTS[name], **(more or {})}, patience)
        return run(scenario, {**self.environment, **(more or {})}, patience)

    def examine(self, backbone: str) -> report.Report:
        """The selftest's report of a backbone."""
        for name in self.asked:
            _examined(backbone, name)
        return _examined(backbone, self.name).result()


@cache
def _examined(backbone: str, name: str) -> Future[report.Report]:
    return POOL.submit(selftest.examine, backbone, ENVIRONMENTS[name])
