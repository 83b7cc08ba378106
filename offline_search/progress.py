"""A search's progress as lines of text: how far, how good, how long still.

Knows nothing about what is searched.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from offline_search.history import History, Trial
from offline_search.records import Chosen, Cost
from offline_search.report.markdown import measured


class Progress:
    """One line a round."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._say = say
        self._clock = clock
        self._began = clock()
        self._first: tuple[float, float] | None = None

    def began(self, history: History, examples: int) -> None:
        """The base policy's figure."""
        base = history.base.objective or 0.0
        took = self._clock() - self._began
        self._say(f"base policy {base:+.4f} on {examples} examples ({took:.0f} s)")
        self._first = (self._clock(), 0.0)

    def round(
        self, number: int, trials: Sequence[Trial], history: History, share: float, cost: Cost
    ) -> None:
        """What became of the candidates, the best so far, and when it may be over."""
        became = Counter(trial.tried.status for trial in trials)
        told = ", ".join(f"{count} {status}" for status, count in became.items())
        best = history.best()
        led = "none" if best is None else f"{best.objective:+.4f} ({best.name} {_origin(best)})"
        tokens = f", {cost.tokens} proposer tokens" if cost.tokens else ""
        self._say(f"{share:4.0%} round {number}: {told}; best {led}{tokens}, {self._left(share)}")
        for trial in trials:
            if trial.tried.status in ("invalid", "unsafe", "unevaluated"):
                self._say(f"       {trial.name} {trial.tried.status}: {trial.tried.reason[:120]}")

    def chosen(self, chosen: Chosen) -> None:
        """The winner on the test split."""
        test = chosen.test
        self._say(
            f"winner {chosen.winner}: test objective {measured(test.objective)}, gain over the "
            f"base policy {measured(test.gain)}, accuracy {100 * test.accuracy:.1f} %"
        )

    def _left(self, share: float) -> str:
        assert self._first is not None, "rounds come after the beginning"
        elapsed = self._clock() - self._first[0]
        if share <= 0:
            return "time left unknown"
        left = elapsed * (1 - share) / share
        return f"{left:.0f} s left" if left < 100 else f"{left / 60:.0f} min left"


def _origin(trial: Trial) -> str:
    return f"by {trial.proposed.origin}"
