"""Scenarios on a real engine, run by a process that exists for the whole test session.

A scenario returns a report, which the tests of its file check. ``python -m tests.serving.scenarios
NAME`` prints one report; with ``--serve`` it runs those whose names come on standard input, one a
line. ``selftest:llava`` is the selftest's report of that backbone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm_autoprune.selftest.run import RUNNERS
from vllm_autoprune.selftest.run import Report as SelftestReport

Report = Any
"""Plain JSON; each scenario's docstring says what is in it."""

SCENARIOS: dict[str, Callable[[], Report]] = {}

PATIENCE = 400.0
"""Seconds that one scenario may take."""

_MARK, _FAILURE, _SELFTEST = "scenario-report:", "scenario-failure:", "selftest:"

_INTERPRETER = str(Path(__file__).with_name("interpreter"))
"""Runs V2 on a CPU (``interpreter/README.md``)."""

# Without these vLLM binds the threads of every engine to the same cores.
_ONE_CORE = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "v1": {**_ONE_CORE, **RUNNERS["v1"]},
    "v2": {
        **_ONE_CORE,
        **RUNNERS["v2"],
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [_INTERPRETER, os.getenv("PYTHONPATH")])),
    },
}
"""Environment variables that select one of vLLM's two model runners."""

_ENGINE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Scenarios of several ranks send functions to their workers.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}


def scenario(function: Callable[[], Report]) -> Callable[[], Report]:
    """Register a function as a scenario of the same name."""
    SCENARIOS[function.__name__] = function
    return function


@dataclass(frozen=True)
class Runner:
    """One of vLLM's two model runners."""

    name: str

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment of a process that uses this runner."""
        return ENVIRONMENTS[self.name]

    def begin(
        self, name: str, more: Mapping[str, str] | None = None, patience: float = PATIENCE
    ) -> Future[Report]:
        """Queue a scenario behind those already queued for the same environment."""
        process = _process(tuple(sorted({**self.environment, **(more or {})}.items())))
        return process.begin(name, patience)

    def run(
        self, name: str, more: Mapping[str, str] | None = None, patience: float = PATIENCE
    ) -> Report:
        """The report of a scenario, run once a session; by another process for ``more``."""
        return self.begin(name, more, patience).result()

    def examine(self, backbone: str) -> SelftestReport:
        """The selftest's report of a backbone."""
        return SelftestReport.model_validate(self.run(f"{_SELFTEST}{backbone}"))


@cache
def _process(environment: tuple[tuple[str, str], ...]) -> _EngineProcess:
    process = _EngineProcess(dict(environment))
    _STARTED.append(process)
    return process


_STARTED: list[_EngineProcess] = []


def end_processes() -> None:
    """End every engine process of this session, and forget the scenarios still queued."""
    for process in _STARTED:
        process.end()


class _EngineProcess:
    """A process that runs scenarios one after another.

    Importing vLLM and starting a first engine takes about twelve seconds of processor time, every
    further engine of the same process one or two. A scenario that ends the process costs only its
    own report: the next one gets a new process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._pool = ThreadPoolExecutor(1)
        self._reports: dict[str, Future[Report]] = {}
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="engine-")
        self._log = Path(self._folder.name) / "engine.log"

    def begin(self, name: str, patience: float) -> Future[Report]:
        """Queue a scenario, once: a failure, too, is that of every test that reads the report."""
        if name not in self._reports:
            self._reports[name] = self._pool.submit(self._run, name, patience)
        return self._reports[name]

    def _run(self, name: str, patience: float) -> Report:
        """The report; AssertionError where there is none."""
        if self._process is None:
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.serving.scenarios", "--serve"],
                    cwd=Path(__file__).resolve().parents[2],
                    env={**os.environ, **_ENGINE, **self._environment},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(name + "\n")
        process.stdin.flush()
        limit = threading.Timer(patience, self._kill)
        limit.start()
        try:
            for line in process.stdout:
                if line.startswith(_MARK):
                    return json.loads(line.removeprefix(_MARK))
                if line.startswith(_FAILURE):
                    failure = json.loads(line.removeprefix(_FAILURE))
                    raise AssertionError(f"scenario {name} failed:\n{failure}\n{self._tail()}")
        finally:
            limit.cancel()
        status = self._close()
        raise AssertionError(
            f"scenario {name} ended its process with {status}; it may take {patience:.0f} s\n"
            f"{self._tail()}"
        )

    def end(self) -> None:
        """End the process and its workers, and forget the scenarios still queued."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._kill()
        self._pool.shutdown()
        self._close()

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _close(self) -> int:
        """Close the pipes of an ended process; returns its exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]  # both are pipes
        return process.wait()

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])


def _report(name: str) -> Report:
    """Run one scenario and leave no engine and no patch behind."""
    from tests.serving import scenarios  # this file, as the tests that register know it
    from tests.serving.engine import release_all

    try:
        if name.startswith(_SELFTEST):
            from tests.serving.engine import LLAVA
            from vllm_autoprune.selftest import serve

            backbone = name.removeprefix(_SELFTEST)
            served = serve.serve_folder(LLAVA) if backbone == "llava" else serve.serve(backbone)
            return json.loads(served.model_dump_json())
        return scenarios.SCENARIOS[name]()
    finally:
        patch.stopall()
        release_all()


def _main() -> None:
    """Run what the command line or standard input names."""
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        importlib.import_module(f"tests.serving.{file.stem}")
    if sys.argv[1] != "--serve":
        print(_MARK + json.dumps(_report(sys.argv[1])))
        return
    for line in sys.stdin:
        try:
            print(_MARK + json.dumps(_report(line.strip())), flush=True)
        except Exception:
            print(_FAILURE + json.dumps(traceback.format_exc()), flush=True)


if __name__ == "__main__":
    _main()
