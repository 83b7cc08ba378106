"""Calls of the plugin's functions while a server answers, in each of its processes.

Times of two servers differ by several per cent for reasons of the machine; calls are exact.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from benchmarks.common import BenchmarkError
from benchmarks.common.client import Client
from benchmarks.common.progress import log_progress
from benchmarks.cost.overhead.settings import Settings, build_request, image_url
from benchmarks.server import serve

_LOG = "AUTOPRUNE_CALL_LOG"
_ROOT = Path(__file__).parents[3]
_ENTRY_POINT = f"[vllm.general_plugins]\nplugin_calls = {__name__}:install\n"

STEPS = frozenset({"create_chat_completion", "step", "step_with_batch_queue", "execute_model"})
"""vLLM's functions that requests call, in the API server, the engine core and the worker."""

PROCESSES = 3
SIDE, TOKENS = 168, 8


@dataclass(frozen=True)
class Calls:
    """Calls while requests were answered."""

    requests: int
    plugin: Counter[str]
    """Qualified names of the plugin's functions."""
    steps: Mapping[int, int]
    """Process -> calls of `STEPS`, which show that calls were counted there."""


def install() -> None:
    """Write each call in this process to a log; a plugin of vLLM, which has it in every process."""
    if sys.getprofile() is not None:
        return
    import vllm

    import vllm_autoprune

    plugin, stock = (os.path.join(module.__path__[0], "") for module in (vllm_autoprune, vllm))
    log = os.open(os.environ[_LOG], os.O_WRONLY | os.O_APPEND)

    def write_call(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith((plugin, stock)):
            return
        ours = code.co_filename.startswith(plugin)
        if ours or code.co_name in STEPS:
            kind = "plugin" if ours else "step"
            os.write(log, f"{os.getpid()} {kind} {code.co_qualname}\n".encode())

    threading.setprofile(write_call)
    sys.setprofile(write_call)


def count_calls(settings: Settings, flags: Sequence[str]) -> Calls:
    """Serve with the plugin and these flags, and count calls of texts and images from start on.

    Raises :class:`BenchmarkError` where calls are not seen in `PROCESSES` processes.
    """
    log_progress(f"inert: calls with {' '.join(flags) or 'no state'}")
    with tempfile.TemporaryDirectory(prefix="calls-") as folder:
        log = Path(folder) / "calls.log"
        log.touch()
        environment = {**profiled(Path(folder)), _LOG: str(log)}
        options = ("--enforce-eager", "--max-model-len", "2048", *flags)
        with serve(settings.model, *options, env=environment) as server:
            start = log.stat().st_size
            client = Client(server.url)
            urls = (None, image_url(0, SIDE, SIDE))
            bodies = [
                build_request(server.model, f"What is number {at}?", url, tokens=TOKENS)
                for url in urls
                for at in range(4)
            ]
            for body in bodies:
                client.send_together([body])
            client.send_together(bodies)
            calls = read_calls(log.read_bytes()[start:].decode(), 2 * len(bodies))
    if len(calls.steps) < PROCESSES:
        raise BenchmarkError(f"calls were seen in {len(calls.steps)} processes, not {PROCESSES}")
    return calls


def profiled(folder: Path) -> dict[str, str]:
    """Environment of a server that has `install` as a plugin, whose metadata is written."""
    metadata = folder / "plugin_calls-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-calls\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(_ENTRY_POINT)
    return {"PYTHONPATH": os.pathsep.join((str(folder), str(_ROOT)))}


def read_calls(text: str, requests: int) -> Calls:
    """The calls of lines that `install` wrote."""
    plugin: Counter[str] = Counter()
    steps: Counter[int] = Counter()
    for line in text.splitlines():
        process, kind, name = line.split(maxsplit=2)
        if kind == "plugin":
            plugin[name] += 1
        else:
            steps[int(process)] += 1
    return Calls(requests, plugin, steps)
