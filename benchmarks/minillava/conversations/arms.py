"""What is compared: all tokens, or a state at K with and without recall in later turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
) -> dict[int, list[Arm]]:
    """The arms of the table of each K: both states without recall and with every K_r.

    Controls of the split state: recall of the largest K_r at random and of the evidence, and no
    recall but as many tokens from the start as recall adds up to.
    """
    tables: dict[int, list[Arm]] = {}
    for budget in budgets:
        arms = [FULL]
        for state in (unsplit, split):
            arms += [Arm(state, budget), *(Arm(state, budget, recall) for recall in recalls)]
        if recalls:
            arms += [Arm(split, budget, max(recalls), by) for by in ("random", "evidence")]
        arms += [Arm(split, budget + recall * (TURNS - 1)) for recall in recalls]
        tables[budget] = arms
    return tables


def list_arms(tables: Mapping[int, Sequence[Arm]]) -> list[Arm]:
    """Every arm of all tables once."""
    return list(dict.fromkeys(arm for arms in tables.values() for arm in arms))
