"""Server process for the embedded model: `vllm serve` for the duration of a search."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from offline_search.proposers.embedded_model import EMBEDDED_MODEL
from vllm_autoprune.errors import SearchError
from vllm_autoprune.ops.dtype import choose_dtype

STARTUP_TIMEOUT = 300.0
"""Seconds that a server may take to start; on two busy cores it takes about one minute."""

CONCURRENT_REQUESTS = 16
"""Requests that the server answers together. A client should have no more in flight: where others
wait, vLLM prefers those whose grammar has just compiled, and requests without one may time out."""

_ENVIRONMENT = {
    # A text model needs no plugin; the cache size suits small machines.
    "VLLM_AUTOPRUNE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}

# A schema allows white space anywhere, of which a small model may write hundreds of tokens.
_COMPACT_JSON = {"backend": "xgrammar", "disable_any_whitespace": True}

_FLAGS = (
    "--max-model-len", "8192",
    "--max-num-seqs", str(CONCURRENT_REQUESTS),
    "--block-size", "32",
    "--structured-outputs-config", json.dumps(_COMPACT_JSON),
    "--enforce-eager",
    "--served-model-name", EMBEDDED_MODEL,
)  # fmt: skip


@contextlib.contextmanager
def serve_model(model: Path) -> Iterator[str]:
    """Base URL of an OpenAI-compatible endpoint; raises :class:`SearchError` if it cannot start."""
    port = _free_port()
    command = [str(Path(sys.executable).with_name("vllm")), "serve", *server_arguments(model, port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**_ENVIRONMENT, **os.environ},
            start_new_session=True,
            preexec_fn=_terminate_with_parent if sys.platform == "linux" else None,
        )
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{port}/health")
        except SearchError as error:
            log.seek(0)
            tail = log.read().decode(errors="replace").splitlines()[-20:]
            raise SearchError("\n".join([str(error), *tail])) from None
        else:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            _terminate(process)


def server_arguments(model: Path, port: int) -> list[str]:
    """Arguments of `vllm serve`."""
    where = ("--host", "127.0.0.1", "--port", str(port))
    return [str(model), *where, "--dtype", choose_dtype(), *_FLAGS]


def _terminate_with_parent() -> None:
    """Let Linux terminate this process when its parent dies, even from SIGKILL."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + STARTUP_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SearchError(f"embedded proposer: vllm serve ended with {process.returncode}:")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.5)
    raise SearchError(f"embedded proposer: vllm serve was not ready after {STARTUP_TIMEOUT:.0f} s:")


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """End the process group with SIGTERM, then with SIGKILL."""
    for signal_number, wait in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait)
            return
