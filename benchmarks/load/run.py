"""One run: locust as a process of its own (or a master with workers), and what came of it.

Knows nothing about gevent: importing locust patches a process, so that nothing here imports it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.load.errors import LoadError
from benchmarks.load.first import come_first
from benchmarks.load.options import Options, arguments
from benchmarks.load.prepared import load
from benchmarks.load.result import RESULT, Result, read_result
from benchmarks.load.server_metrics import fetch
from benchmarks.server import free_port

LOCUSTFILE = Path(__file__).resolve().parents[1] / "locustfile.py"
LOG = "locust.log"


def check(options: Options) -> None:
    """Raise :class:`LoadError` where the server is down or does not know the model.

    Once before the clock starts, so that a misspelt name is not a thousand failed requests.
    """
    text = fetch(options.url, "/v1/models")
    if text is None:
        raise LoadError(
            f"server {options.url}: /v1/models is not answered -> start it, or fix the URL"
        )
    try:
        names = [str(one["id"]) for one in json.loads(text)["data"]]
    except (ValueError, KeyError, TypeError):
        raise LoadError(f"server {options.url}: /v1/models is not a list of models") from None
    model = load(options.workload).workload.model
    if model not in names:
        raise LoadError(
            f"server {options.url}: does not serve {model!r}, only {', '.join(names)} "
            "-> prepare the workload with --model"
        )


def run(options: Options, workers: int = 0) -> Result:
    """Send the workload once; the result is valid or says why not.

    ``workers`` above 0 starts a master and so many workers on this machine. Raises
    :class:`LoadError` where there is no result at all.
    """
    check(options)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / RESULT).unlink(missing_ok=True)
        with (options.out / LOG).open("wb") as log:
            status = _locust(options, workers, log.fileno())
    except OSError as error:
        raise LoadError(f"{options.out}: cannot be written: {error}") from error
    if not (options.out / RESULT).is_file():
        tail = (options.out / LOG).read_text(errors="replace").strip().splitlines()[-5:]
        told = " | ".join(tail)
        raise LoadError(f"{options.out}: locust ended with {status} and no result: {told}")
    return read_result(options.out)


def _locust(options: Options, workers: int, log: int) -> int:
    common = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE)]
    head = [*common, "--headless", "--only-summary", *arguments(options)]
    with contextlib.ExitStack() as stack:
        if workers:
            port = str(free_port())
            head += ["--master", "--expect-workers", str(workers), "--master-bind-port", port]
            join = [*common, "--worker", "--master-port", port]
            for _ in range(workers):
                stack.enter_context(_process(join, log))
        with _process(head, log) as process:
            return process.wait()


@contextlib.contextmanager
def _process(command: Sequence[str], log: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, ahead of the server's, ended with the block."""
    environment = {**os.environ, "PYTHONPATH": str(LOCUSTFILE.parents[1])}
    process = subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
        preexec_fn=come_first,
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
