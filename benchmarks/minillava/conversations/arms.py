"""What is compared: all tokens, or a state at K with and without recall in later turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.minillava.conversations.draw import TURNS

RecallBy = Literal["question", "random", "evidence"]
"""How recalled tokens are chosen; the last two are controls, which no server offers."""


@dataclass(frozen=True)
class Arm:
    """One way to keep tokens; without a state, all of them.

    `recall` is K_r, the number of tokens that every later turn brings back.
    """

    state: str | None = None
    budget: int = 0
    recall: int = 0
    recall_by: RecallBy = "question"

    @property
    def name(self) -> str:
        """The key of its answers."""
        if self.state is None:
            return "full"
        recall = f" recall {self.recall} by {self.recall_by}" if self.recall else ""
        return f"{self.state} {self.budget}{recall}"

    @property
    def served(self) -> bool:
        """Whether a server can be asked for it."""
        return self.recall == 0 or self.recall_by == "question"

    def without_recall(self) -> Arm:
        """The arm that differs in recall only."""
        return Arm(self.state, self.budget)


FULL = Arm()


def build_arms(
    unsplit: str, split: str, budgets: Sequence[int], recalls: Sequence[int]
) -> list[Arm]:
    """All arms: both states at every K, with every K_r and with as many tokens from the start.

    The controls, random tokens and the evidence, recall the largest K_r.
    """
    arms = [FULL]
    for budget in budgets:
        for state in (unsplit, split):
            arms.append(Arm(state, budget))
            arms += [Arm(state, budget, recall) for recall in recalls]
        most = max(recalls)
        arms += [Arm(split, budget, most, "random"), Arm(split, budget, most, "evidence")]
        arms += [Arm(split, budget + recall * (TURNS - 1)) for recall in recalls]
    return list(dict.fromkeys(arms))
