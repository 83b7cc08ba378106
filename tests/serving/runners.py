"""Functions and tests that run in a process with one of vLLM's two model runners.

The process exists for a whole test session: importing vLLM and starting a first engine takes about
twelve seconds of processor time, every further engine of the same process one or two. The functions
of a session are queued when its tests are collected, so that both runners work at once.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
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
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest

from vllm_autoprune.selftest.run import ENGINE_ENVIRONMENT, RUNNERS

Result = Any
"""What a function returns, as JSON."""

_PATIENCE = 1500.0
"""Seconds that one function may take."""

# Without these vLLM binds the threads of every engine to the same cores.
_ONE_CORE = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_INTERPRETER = str(Path(__file__).with_name("interpreter"))
"""Runs V2 on a CPU (``interpreter/README.md``)."""

ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "v1": {**_ONE_CORE, **RUNNERS["v1"]},
    "v2": {
        **_ONE_CORE,
        **RUNNERS["v2"],
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [_INTERPRETER, os.getenv("PYTHONPATH")])
        ),
    },
}
"""Environment variables that select one of vLLM's two model runners."""

# Tests of several ranks send functions to their workers.
_ENGINE = {**ENGINE_ENVIRONMENT, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
_RESULT = "engine-result:"
_FAILURE = "engine-failure:"


@dataclass(frozen=True)
class Runner:
    """One of vLLM's two model runners."""

    name: str

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment of a process that uses this runner."""
        return ENVIRONMENTS[self.name]

    def begin(
        self,
        function: Callable[..., Result],
        environment: Mapping[str, str] | None = None,
        **parameters: object,
    ) -> Future[Result]:
        """Queue a function behind those already queued for the same environment, once a session."""
        variables = tuple(sorted({**self.environment, **(environment or {})}.items()))
        call = json.dumps([function.__module__, function.__name__, parameters])
        if variables not in _PROCESSES:
            _PROCESSES[variables] = _EngineProcess(dict(variables))
        return _PROCESSES[variables].begin(call)

    def run(
        self, function: Callable[..., Result], *process: Any, **parameters: Any
    ) -> Result:
        """What :meth:`begin` has queued returns; its failure is that of every test that asks."""
        return self.begin(function, *process, **parameters).result()


def in_engine(function: Callable[..., Result]) -> Callable[..., None]:
    """Let a test run in the process of its parameter ``runner``; others have to be JSON.

    It leaves no engine and no patch behind.
    """

    def test(runner: Runner, **parameters: object) -> None:
        runner.run(function, None, **parameters)

    signature = inspect.signature(function)
    runner_parameter = inspect.Parameter(
        "runner", inspect.Parameter.POSITIONAL_OR_KEYWORD
    )
    signature = signature.replace(
        parameters=[runner_parameter, *signature.parameters.values()]
    )
    test.__name__, test.__doc__, test.__module__ = (
        function.__name__,
        function.__doc__,
        function.__module__,
    )
    vars(test).update(__signature__=signature, in_engine=function)
    return test


def find_functions(item: pytest.Item) -> list[Callable[..., Result]]:
    """What runs in an engine's process for a test: the test, and what it reads by its marks."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return []
    functions = [vars(item.obj).get("in_engine")]
    functions += [
        function for mark in item.iter_markers("reads") for function in mark.args
    ]
    return [function for function in functions if function]


def begin_tests(items: list[pytest.Item]) -> None:
    """Queue the tests that run in an engine's process, and what others read.

    They read the functions of their mark ``reads``, with those of their parameters that these take.
    """
    for item in items:
        for function in find_functions(item):
            parameters = dict(cast("pytest.Function", item).callspec.params)
            taken = inspect.signature(function).parameters
            chosen = {
                name: value for name, value in parameters.items() if name in taken
            }
            Runner(str(parameters["runner"])).begin(function, None, **chosen)


_PROCESSES: dict[tuple[tuple[str, str], ...], _EngineProcess] = {}
"""By the environment of each."""


def end_processes() -> None:
    """End every engine process of this session, and forget what is still queued."""
    for process in _PROCESSES.values():
        process.end()


class _EngineProcess:
    """Runs calls one after another; one that ends the process costs only its own result."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = {**os.environ, **_ENGINE, **environment}
        self._pool = ThreadPoolExecutor(1)
        self._results: dict[str, Future[Result]] = {}
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="engine-")
        self._log = Path(self._folder.name) / "engine.log"

    def begin(self, call: str) -> Future[Result]:
        if call not in self._results:
            self._results[call] = self._pool.submit(self._run, call)
        return self._results[call]

    def _run(self, call: str) -> Result:
        """The result; AssertionError where there is none."""
        if self._process is None:
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.serving.runners"],
                    cwd=Path(__file__).resolve().parents[2],
                    env=self._environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
        process = self._process
        failure = ""
        limit = threading.Timer(_PATIENCE, self._kill)
        limit.start()
        try:
            print(call, file=process.stdin, flush=True)
            for line in process.stdout or ():
                if line.startswith(_RESULT):
                    return json.loads(line.removeprefix(_RESULT))
                if line.startswith(_FAILURE):
                    failure = json.loads(line.removeprefix(_FAILURE))
                    break
            else:
                failure = f"the process ended with {self._close()}; {_PATIENCE:.0f} s are allowed"
        finally:
            limit.cancel()
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])
        raise AssertionError(f"{call} failed:\n{failure}\n{tail}")

    def end(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._kill()
        self._pool.shutdown()
        self._close()

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _close(self) -> int | None:
        """Close the pipes of an ended process; returns its exit status."""
        process = self._process
        self._process = None
        if process is None:
            return None
        with contextlib.suppress(BrokenPipeError), process:
            pass
        return process.returncode


def _serve_calls() -> None:
    """Make the calls that stand on standard input, one a line."""
    from _pytest.config import _prepareconfig

    # Rewrites asserts, so that they show their values.
    _prepareconfig(["--capture=no", "-p", "no:cacheprovider"])
    from tests.serving.engine import stop_all

    for line in sys.stdin:
        module, name, parameters = json.loads(line)
        try:
            function = getattr(importlib.import_module(module), name)
            result = vars(function).get("in_engine", function)(**parameters)
            print(_RESULT + json.dumps(result), flush=True)
        except (Exception, pytest.fail.Exception, pytest.skip.Exception):  # noqa: BLE001
            print(_FAILURE + json.dumps(traceback.format_exc()), flush=True)
        finally:
            patch.stopall()
            stop_all()


if __name__ == "__main__":
    _serve_calls()
