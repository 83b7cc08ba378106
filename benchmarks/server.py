"""A real `vllm serve` as a context manager: started, waited for, and always ended."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import httpx
import torch

from benchmarks import BenchmarkError
from vllm_autoprune.connection import Connection, make_client
from vllm_autoprune.ops.dtype import choose_dtype

CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
"""Environment of small models on a CPU; a server on a GPU ignores it."""
_CPU_FLAGS = ("--block-size", "32", "--enforce-eager", "--max-num-seqs", "8")
_PR_SET_PDEATHSIG = 1


@cache
def _connect() -> httpx.Client:
    """The HTTP client of this process, with a new connection for each request.

    The client is shared, because it takes 60 ms to make.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    headers = {"Connection": "close"}
    return make_client(
        httpx.Client, "http://127.0.0.1", Connection(), headers=headers, limits=limits
    )


def default_flags() -> tuple[str, ...]:
    """Flags of a server that is measured: none on a GPU, where users get vLLM's defaults.

    On a CPU there are no graphs to capture, and compiling takes minutes.
    """
    # Not is_available(): after that call an engine could not fork its workers.
    return () if torch.cuda.device_count() else _CPU_FLAGS


class ServerDied(BenchmarkError):
    """A server that ended before it was ready, or was not ready in time."""

    @classmethod
    def diagnose(cls, log: Path, cause: str = "") -> ServerDied:
        """The error of a server with this log; the end of the log becomes a note.

        Unless ``cause`` is given, it is taken from the log: the refusal of the plugin, else the
        first error (processes pass errors on), else the last line.
        """
        text = log.read_text(errors="replace") if log.is_file() else ""
        _, _, refusal = text.partition("\nvllm-autoprune: ")
        errors = re.findall(
            r"(?:^|\] )(\w*(?:Error|Exception): .*)$", text, re.MULTILINE
        )
        last_line = text.strip().rpartition("\n")[2]
        causes = [cause, " ".join(refusal.split()), *errors[:1], last_line, "no output"]
        what = next(filter(None, causes))
        error = cls.of(str(log), what, subject="the server did not start")
        error.add_note("\n".join(text.splitlines()[-40:]))
        return error


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    model: str
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str) -> str:
        """Body of a GET request, such as ``/metrics``; raises :class:`httpx.HTTPError`."""
        return _connect().get(self.url + path, timeout=60.0).raise_for_status().text

    def post(
        self,
        path: str,
        body: Mapping[str, object],
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, dict[str, object]]:
        """Send a POST request on a new connection; returns status and JSON body."""
        # httpx's own encoder refuses some of the bodies that tests of attacks send.
        content_type = {"Content-Type": "application/json", **(headers or {})}
        answer = _connect().post(
            self.url + path,
            content=json.dumps(body),
            headers=content_type,
            timeout=300.0,
        )
        content: object = {}
        if answer.content:
            try:
                content = answer.json()
            except ValueError:
                content = answer.text
        if not isinstance(content, dict):
            content = {"error": content}
        return answer.status_code, content

    def await_api_servers(self, count: int, patience: float = 60.0) -> None:
        """Wait until ``count`` API servers are up; the health check is answered once the first is.

        Raises :class:`ServerDied` if they are not up in time.
        """
        deadline = time.monotonic() + patience
        while self.logged().count("Application startup complete") < count:
            if time.monotonic() > deadline:
                raise ServerDied.diagnose(
                    self.log, f"{count} API servers not ready in {patience:.0f} s"
                )
            time.sleep(0.2)

    def logged(self) -> str:
        """Everything that the server has printed so far."""
        return self.log.read_text(errors="replace")


def _free_port() -> int:
    """A TCP port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(
    model: str | Path,
    port: int,
    flags: Sequence[str] = (),
    subcommand: Sequence[str] = ("serve",),
) -> list[str]:
    """The command line of a small local server, run by this interpreter's ``vllm``.

    ``subcommand`` is the words of ``vllm`` before the model. Without a ``--dtype`` in ``flags`` it
    uses the dtype that this machine multiplies fast.
    """
    vllm = Path(sys.executable).with_name("vllm")
    where = ("--host", "127.0.0.1", "--port", str(port), "--dtype", choose_dtype())
    return [str(vllm), *subcommand, str(model), *where, *flags]


@contextlib.contextmanager
def serve(
    model: str | Path,
    *flags: str,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    patience: float = 900.0,
    subcommand: Sequence[str] = ("serve",),
) -> Iterator[Server]:
    """Serve ``model`` until the context ends, in whatever way it ends.

    The server gets its own process group, which is ended as a whole. On Linux it also ends when
    this process is killed, which vLLM ignores while it starts. Raises :class:`ServerDied` if the
    server does not come up.
    """
    port = _free_port()
    # A proxy of the environment cannot reach servers on this machine.
    exempt = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    os.environ["no_proxy"] = ",".join(
        sorted({"127.0.0.1", *filter(None, exempt.split(","))})
    )
    with contextlib.ExitStack() as stack:
        if log is None:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="vllm-server-")
            )
            log = Path(folder) / "server.log"
        out = stack.enter_context(log.open("wb"))
        die_with_parent = partial(
            ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM
        )
        process = subprocess.Popen(
            command(model, port, flags, subcommand),
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **CPU_ENVIRONMENT, **(env or {})},
            start_new_session=True,
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )
        stack.callback(end_group, process)
        server = Server(f"http://127.0.0.1:{port}", str(model), process, log)
        deadline = time.monotonic() + patience
        ready = False
        try:
            while not ready:
                if process.poll() is not None:
                    raise ServerDied.diagnose(log)
                if time.monotonic() > deadline:
                    raise ServerDied.diagnose(log, f"not ready in {patience:.0f} s")
                with contextlib.suppress(httpx.HTTPError):
                    server.get("/health")
                    ready = True
                time.sleep(0 if ready else 0.25)
        except BaseException:
            # vLLM ignores SIGTERM while it starts, and has no requests to finish yet.
            end_group(process, grace=2.0)
            raise
        yield server


def end_group(process: subprocess.Popen[bytes], grace: float = 20.0) -> None:
    """Terminate a process group, then kill it; a second Ctrl-C does not interrupt this."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        for sent, wait in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
            deadline = time.monotonic() + wait
            try:
                os.killpg(process.pid, sent)
                while time.monotonic() < deadline:
                    process.poll()  # reaps the leader; as a zombie it would keep the group alive
                    os.killpg(process.pid, 0)
                    time.sleep(0.1)
            except ProcessLookupError:
                process.poll()
                return
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
