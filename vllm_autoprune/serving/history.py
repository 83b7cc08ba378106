"""History mode: a conversation's newest images keep K tokens, older ones their core alone."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vllm_autoprune.errors import BudgetError
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.state import PruningState

HISTORY_FIX = (
    'give the newest images that keep K, as in "2", "2:1/8" or "2:128,every=4"'
)

NO_CORE_FIX = "say how many tokens older images keep, as in 1:1/8"

_PATTERN = re.compile(
    r"(?P<newest>\d{1,6})(:(?P<core>[^,]+))?(,every=(?P<every>\d{1,6}))?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class History:
    """Which images of a request are retired, and how many tokens those keep.

    Images are retired from the first on, ``every`` at a time, so that at least the ``newest`` are
    not. A retired image keeps its core alone. The core stands before the other tokens of its image,
    so its KV stays when these are dropped::

        turn 1   [core 1][delta 1][reply]
        turn 2   [core 1][reply][core 2][delta 2][reply]
                         ^ recomputed from here on

    ``core`` is the number of core tokens, or their share of K; None for the state's own.
    """

    newest: int
    core: BudgetCall | None = None
    every: int = 1

    @classmethod
    def parse(cls, value: object, where: str) -> History:
        """Parse a rule such as ``2:128,every=4``; raises :class:`BudgetError`."""
        if isinstance(value, History):
            return value
        is_text = isinstance(value, str | int) and not isinstance(value, bool)
        match = _PATTERN.fullmatch(str(value).strip()) if is_text else None
        if match is None or not int(match["newest"]) or not int(match["every"] or 1):
            what = f"{str(value)[:80]!r} is not known"
            raise BudgetError.of(where, what, HISTORY_FIX, subject="history")
        core = None
        if match["core"] is not None:
            core = BudgetCall.parse(match["core"], where)
        return cls(int(match["newest"]), core, int(match["every"] or 1))

    def __str__(self) -> str:
        core = "" if self.core is None else f":{self.core.rule()}"
        every = "" if self.every == 1 else f",every={self.every}"
        return f"{self.newest}{core}{every}"

    def count_retired(self, images: int) -> int:
        """Number of images, from the first on, that are retired in a request of so many."""
        return max(0, images - self.newest) // self.every * self.every

    def has_core(self, state: PruningState) -> bool:
        """Whether the number of core tokens is known, by this rule or the state."""
        return self.core is not None or state.core is not None

    def count_core(self, state: PruningState, budget: int) -> int:
        """K_c of an image that keeps ``budget`` tokens until it is retired."""
        if self.core is not None:
            return min(budget, self.core.tokens_kept(budget))
        assert state.core is not None, "checked when the rule was read"
        return max(1, state.core.tokens(budget))
