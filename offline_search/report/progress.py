"""Progress of a running search as lines of text: results of each round and remaining time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from offline_search.evaluation.history import FAILURES_TO_GIVE_UP, History, Trial, gave_up
from offline_search.ledger.records import Cost, WinnerRecord
from offline_search.report.markdown import describe_leader, format_interval


class ProgressLog:
    """Writes one line a round, and one line for each candidate that was not evaluated."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._write = write
        self._clock = clock
        self._created = clock()
        self._rounds_started = self._created
        self._leader: str | None = None

    def on_start(self, history: History, examples: int) -> None:
        """Write the base policy's objective."""
        base = history.base.objective or 0.0
        elapsed = self._clock() - self._created
        self._write(f"base policy {base:+.4f} on {examples} examples ({elapsed:.0f} s)")
        self._rounds_started = self._clock()

    def on_round(
        self, number: int, trials: Sequence[Trial], history: History, share: float, cost: Cost
    ) -> None:
        """Write the results of a round, the best so far, and the remaining time."""
        best = history.best()
        self._leader = None if best is None else best.name
        counts = Counter(trial.result.status for trial in trials)
        statuses = ", ".join(f"{count} {status}" for status, count in counts.items())
        tokens = f", {cost.tokens} proposer tokens" if cost.tokens else ""
        self._write(
            f"{share:4.0%} round {number}: {statuses}; {_describe_leader(history)}{tokens}, "
            f"{self._remaining_time(share)}"
        )
        for trial in trials:
            if trial.result.status in ("invalid", "unsafe", "unevaluated"):
                self._write(
                    f"       {trial.name} {trial.result.status}: {trial.result.reason[:120]}"
                )
        if gave_up([trial.result for trial in history.trials]):
            self._write(
                f"gives up: the last {FAILURES_TO_GIVE_UP} candidates were invalid or unsafe"
            )

    def on_finish(self, winner: WinnerRecord) -> None:
        """Write the winner's scores on the test split, and whether it led the search."""
        test = winner.test
        self._write(
            f"winner {winner.winner}: test objective {format_interval(test.objective)}, gain over "
            f"the base policy {format_interval(test.gain)}, accuracy {100 * test.accuracy:.1f} %"
        )
        if self._leader is not None:
            self._write(describe_leader(winner, self._leader))

    def _remaining_time(self, share: float) -> str:
        elapsed = self._clock() - self._rounds_started
        if share <= 0:
            return "time left unknown"
        seconds = elapsed * (1 - share) / share
        return f"{seconds:.0f} s left" if seconds < 100 else f"{seconds / 60:.0f} min left"


def _describe_leader(history: History) -> str:
    best = history.best()
    if best is None:
        return "no leader on the search split"
    return f"{best.name} by {best.proposal.origin} leads on the search split, {best.score:+.4f}"
