"""Signal handling of the demo: Ctrl-C, SIGTERM and SIGHUP end it and its running server."""

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
    """Raised in the main thread while a server is running."""


class InterruptHandler:
    """Handles these signals for the rest of the process.

    An import of a large library may swallow an exception raised by a signal handler. So it is
    raised only while a server is running; otherwise the process just ends.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._guarded = False
        for each in SIGNALS:
            signal.signal(each, self._stop)

    @property
    def status(self) -> int:
        """The conventional exit status: 130 after Ctrl-C."""
        return 128 + self.signum

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Within the block a signal raises :class:`Stopped`, so that servers are ended."""
        self._guarded = True
        try:
            yield
        finally:
            self._guarded = False
            if self.signum:
                # The servers are ended; a second signal must not interrupt the exit.
                for each in SIGNALS:
                    signal.signal(each, signal.SIG_IGN)

    def print_message(self) -> None:
        """Print the last line of an interrupted demo."""
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h\n")  # a progress bar hides the cursor
        print(_LINE, file=sys.stderr, flush=True)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        if self._guarded:
            raise Stopped
        else:
            self.print_message()
            os._exit(self.status)
