"""The embedded model behind `vllm serve` of this interpreter, for as long as a search runs.

Knows nothing about proposals.
"""

from __future__ import annotations

import contextlib
import ctypes
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

from offline_search.proposers.embedded.convert import NAME
from vllm_autoprune.errors import SearchError

PATIENCE = 300.0
"""Seconds that a server may take to start; on two busy cores it takes about one minute."""

_ENVIRONMENT = {
    # The plugin has nothing to do in a text model; caches and threads as small machines need them.
    "VLLM_AUTOPRUNE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}

_FLAGS = (
    "--dtype", "bfloat16",
    "--max-model-len", "8192",
    "--max-num-seqs", "16",
    "--enforce-eager",
    "--served-model-name", NAME,
)  # fmt: skip


@contextlib.contextmanager
def served(model: Path) -> Iterator[str]:
    """Base URL of an OpenAI-compatible endpoint; raises :class:`SearchError` if none comes up."""
    port = _free_port()
    vllm = str(Path(sys.executable).with_name("vllm"))
    command = [vllm, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), *_FLAGS]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**_ENVIRONMENT, **os.environ},
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        try:
            _await(process, f"http://127.0.0.1:{port}/health")
        except SearchError as error:
            log.seek(0)
            tail = log.read().decode(errors="replace").splitlines()[-20:]
            raise SearchError("\n".join([str(error), *tail])) from None
        else:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            _end(process)


def _end_with_parent() -> None:
    """A search that is killed ends nothing by itself; Linux ends its server for it."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SearchError(f"embedded proposer: vllm serve ended with {process.returncode}:")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.5)
    raise SearchError(f"embedded proposer: vllm serve was not ready after {PATIENCE:.0f} s:")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process group: politely, then for good."""
    for sent, wait in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait)
            return
