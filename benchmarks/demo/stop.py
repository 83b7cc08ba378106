"""Ctrl-C, SIGTERM, a closed terminal: the end comes at once, or after that of a running server.

Knows nothing about how a server is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import TypeVar

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
T = TypeVar("T")
_LINE = "demo: stopped, no server is left running"


class Stopped(KeyboardInterrupt):
    """Raised wherever the main thread was while something had to be ended."""


class Stopper:
    """Installed as the handler of these signals for the rest of the process.

    An exception out of a signal handler may be swallowed: by an import of a large library, by an
    event loop. So it is raised only where neither runs; elsewhere the process ends on the spot,
    having nothing to end, or the task is cancelled.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._guarded = False
        self._cancel: Callable[[], object] | None = None
        for each in SIGNALS:
            signal.signal(each, self._stop)

    @property
    def status(self) -> int:
        """Exit status by convention: 130 after Ctrl-C."""
        return 128 + self.signum

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Within, a signal raises :class:`Stopped`, so that what was started is ended."""
        self._guarded = True
        try:
            yield
        finally:
            self._guarded = False
            if self.signum:
                # All is ended, and the way out must not be interrupted once more.
                for each in SIGNALS:
                    signal.signal(each, signal.SIG_IGN)

    async def cancellable(self, work: Awaitable[T]) -> T:
        """Await ``work``; a signal cancels it and raises :class:`Stopped` once it has ended."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancel = task.cancel
        self._cancel = lambda: loop.call_soon_threadsafe(cancel)
        try:
            return await work
        except asyncio.CancelledError:
            raise Stopped from None
        finally:
            self._cancel = None

    def say(self) -> None:
        """The one line that a stopped demo ends with."""
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h\n")  # a progress bar hides the cursor
        print(_LINE, file=sys.stderr, flush=True)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        if self._cancel is not None:
            self._cancel()
        elif self._guarded:
            raise Stopped
        else:
            self.say()
            os._exit(self.status)
