"""How far an evaluation is, how fast, and how long still: one line every few seconds.

Knows nothing about what is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_PAUSE = 10.0


class Progress:
    """Counts what is done of ``total``; ``say`` gets a line at most every ten seconds."""

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.say = say
        self._clock = clock
        self._total = self._done = self._before = 0
        self._began = self._said = clock()

    def begin(self, total: int, before: int = 0) -> None:
        """``before`` of the ``total`` were done by an earlier run and say nothing about speed."""
        self._total, self._before, self._done = total, before, before
        self._began = self._said = self._clock()
        if before:
            self.say(f"{before:,} of {total:,} are there already")

    def advance(self, count: int = 1) -> None:
        """Some more are done."""
        self._done += count
        now = self._clock()
        if now - self._said >= _PAUSE or self._done == self._total:
            self._said = now
            self.say(self._line(now - self._began))

    def _line(self, elapsed: float) -> str:
        rate = (self._done - self._before) / max(elapsed, 1e-9)
        left = (self._total - self._done) / max(rate, 1e-9)
        shown = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min"
        share = self._done / self._total
        return f"{share:4.0%}  {self._done:,} of {self._total:,}, {rate:.2g}/s, {shown} left"
