"""Ctrl-C, SIGTERM, a closed terminal: the end comes at once, or after that of a running server.

Knows nothing about how a server is ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LINE = "demo: stopped, no server is left running"


class Stopped(KeyboardInterrupt):
    """Raised wherever the main thread was while something had to be ended."""


class Stopper:
    """Installed as the handler of these signals for the rest of the process."""

    def __init__(self) -> None:
        self.signum = 0
        self._guarded = 0
        for each in SIGNALS:
            signal.signal(each, self._stop)

    @property
    def status(self) -> int:
        """Exit status by convention: 130 after Ctrl-C."""
        return 128 + self.signum

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Within, a signal raises :class:`Stopped`, so that what was started is ended.

        Elsewhere the process ends on the spot: there is nothing to end, and an exception might
        be swallowed, as imports of large libraries do.
        """
        self._guarded += 1
        try:
            yield
        finally:
            self._guarded -= 1

    def say(self) -> None:
        """The one line that a stopped demo ends with."""
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h\n")  # a progress bar hides the cursor
        print(_LINE, file=sys.stderr, flush=True)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        if self._guarded:
            raise Stopped
        self.say()
        os._exit(self.status)
