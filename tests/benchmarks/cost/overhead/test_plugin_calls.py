"""Counting the plugin's calls in a process, as vLLM would load the counter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

from benchmarks.cost.overhead import plugin_calls
from benchmarks.cost.overhead.plugin_calls import profiled, read_calls

_PROCESS = """
import threading
from vllm_autoprune import statistics
from benchmarks.cost.overhead.plugin_calls import install

statistics.spread([1.0])
install()
install()
statistics.spread([1.0])
thread = threading.Thread(target=statistics.spread, args=([2.0],))
thread.start()
thread.join()
"""


def test_calls_are_counted_from_installation_on_in_every_thread(tmp_path: Path) -> None:
    log = tmp_path / "calls.log"
    log.touch()
    environment = {**os.environ, **profiled(tmp_path), plugin_calls._LOG: str(log)}
    subprocess.run([sys.executable, "-c", _PROCESS], env=environment, check=True)
    calls = read_calls(log.read_text(), 1)
    assert calls.plugin["spread"] == 2


def test_the_counter_is_a_plugin_of_vllm(tmp_path: Path) -> None:
    profiled(tmp_path)
    (distribution,) = Distribution.discover(path=[str(tmp_path)])
    (entry,) = distribution.entry_points
    assert (entry.group, entry.load()) == ("vllm.general_plugins", plugin_calls.install)


def test_lines_are_counted_by_function_and_process() -> None:
    calls = read_calls("1 step Core.step\n1 plugin f.<locals>.g\n2 step Core.step\n1 step s\n", 3)
    assert (calls.requests, dict(calls.plugin)) == (3, {"f.<locals>.g": 1})
    assert calls.steps == {1: 2, 2: 1}
