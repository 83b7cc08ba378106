"""One run of a load test: locust in processes of its own, because importing it patches sockets."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common import BenchmarkError
from benchmarks.common.metrics import list_models
from benchmarks.load.client import raise_priority
from benchmarks.load.result import RESULT, Result, read_result
from benchmarks.load.settings import LOCUST_OWN, RunOptions, to_flags
from benchmarks.load.workload import load_prepared
from benchmarks.server import free_port

LOCUSTFILE = Path(__file__).resolve().parents[1] / "locustfile.py"
LOG = "locust.log"


def check_server(options: RunOptions) -> None:
    """Raise :class:`BenchmarkError` where the server is down or does not serve the model."""
    names = list_models(options.url)
    model = load_prepared(options.workload).workload.model
    if model not in names:
        raise BenchmarkError(
            f"server {options.url}: does not serve {model!r}, only {', '.join(names)} "
            "-> prepare the workload with --model"
        )


def run(options: RunOptions) -> Result:
    """Send the workload once; the result is valid or has the reasons why not.

    Where it has workers, a master and so many workers are started on this machine. Raises
    :class:`BenchmarkError` where there is no result at all.
    """
    check_server(options)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / RESULT).unlink(missing_ok=True)
        with (options.out / LOG).open("wb") as log:
            status = _locust(options, log.fileno())
    except OSError as error:
        raise BenchmarkError(f"{options.out}: cannot be written: {error}") from error
    if not (options.out / RESULT).is_file():
        tail = (options.out / LOG).read_text(errors="replace").strip().splitlines()[-5:]
        raise BenchmarkError(
            f"{options.out}: locust ended with {status} and no result: {' | '.join(tail)}"
        )
    return read_result(options.out)


def _locust(options: RunOptions, log: int) -> int:
    common = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE)]
    head = [*common, "--headless", "--only-summary", *to_flags(options, LOCUST_OWN)]
    head += ["--host", options.url]
    head += ["--users", str(options.users)] if options.users else []
    with contextlib.ExitStack() as stack:
        if options.workers:
            port = str(free_port())
            head += [
                "--master",
                "--expect-workers",
                str(options.workers),
                "--master-bind-port",
                port,
            ]
            join = [*common, "--worker", "--master-port", port]
            for _ in range(options.workers):
                stack.enter_context(_process(join, log))
        with _process(head, log) as process:
            return process.wait()


@contextlib.contextmanager
def _process(command: Sequence[str], log: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, of raised priority; it is ended with the block."""
    environment = {**os.environ, "PYTHONPATH": str(LOCUSTFILE.parents[1])}
    process = subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
        preexec_fn=raise_priority,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
