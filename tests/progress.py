"""pytest plugin: a line every few seconds that says how far a run is and how long is left.

Estimates weigh each test file by the seconds it took when ``tests/durations.json`` was written
(``pytest --write-durations``); files not in it count by their number of tests.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
INTERVAL = 15.0
"""Seconds between two lines."""
DEFAULT = 0.05
"""Seconds of a test in a file that was not timed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-durations", action="store_true", help="write the seconds of each file"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist report to the controller
        config.pluginmanager.register(Progress(config), "progress-lines")


def time_left(elapsed: float, done: float, total: float) -> float | None:
    """Seconds left, from ``done`` of ``total`` expected seconds that took ``elapsed``."""
    if done <= 0:
        return None
    return elapsed * max(0.0, total - done) / done


class Progress:
    """Counts the tests that ended, by file."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._started = self._last = time.monotonic()
        self._per_test: dict[str, float] = {}
        self._total = self._done = 0.0
        self._ended: set[str] = set()
        self._seconds: dict[str, float] = defaultdict(float)
        self._known: dict[str, float] = (
            json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
        )

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._expect([item.nodeid for item in items])

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        if not self._per_test:
            self._expect(ids)

    def _expect(self, ids: list[str]) -> None:
        counts = Counter(_file(node) for node in ids)
        self._per_test = {
            file: self._known.get(file, DEFAULT * count) / count for file, count in counts.items()
        }
        self._total = sum(self._per_test[file] * count for file, count in counts.items())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = _file(report.nodeid)
        self._seconds[file] += report.duration
        if report.when != "teardown" or report.nodeid in self._ended:
            return
        self._ended.add(report.nodeid)
        self._done += self._per_test.get(file, DEFAULT)
        now = time.monotonic()
        if now - self._last >= INTERVAL:
            self._last = now
            self._print(now - self._started, file)

    def _print(self, elapsed: float, file: str) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        left = time_left(elapsed, self._done, self._total)
        if reporter is None or left is None:
            return
        share = min(99, round(100 * self._done / max(self._total, self._done)))
        reporter.write_line(
            f"\n{share} % after {_clock(elapsed)}, about {_clock(left)} left; {file}"
        )

    def pytest_sessionfinish(self) -> None:
        if self._config.getoption("write_durations"):
            known = {**self._known, **{file: round(s, 1) for file, s in self._seconds.items()}}
            rows = {file: known[file] for file in sorted(known) if Path(file).exists()}
            DURATIONS.write_text(json.dumps(rows, indent=1) + "\n")


def _file(node: str) -> str:
    return node.partition("::")[0]


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
