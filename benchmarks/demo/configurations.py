"""The rows of the table: which tokens are kept, and how many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Keep = Literal["full", "random", "resized", "reference", "state"]

NAMES: dict[Keep, str] = {
    "full": "full",
    "random": "random keep",
    "resized": "resize control",
    "reference": "base policy",
    "state": "shipped state",
}
BUDGETS: tuple[int, ...] = (16, 8)


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to serve an image: all of its tokens, or ``budget`` of them."""

    keep: Keep
    budget: int | None = None

    @property
    def label(self) -> str:
        """Short and unique, such as ``reference 8``."""
        return self.keep if self.budget is None else f"{self.keep} {self.budget}"

    @property
    def extra_body(self) -> dict[str, object]:
        """The pruning fields of a request; none for the stock server."""
        if self.keep == "full":
            return {}
        return {"mm_processor_kwargs": {"autoprune": {"budget": self.budget, "keep": self.keep}}}


FULL = Configuration("full")
KEEPS: tuple[Keep, ...] = ("random", "resized", "reference", "state")
"""Ways to have K tokens: two controls, then the state without its exchanges and with them."""

PRUNED: tuple[Configuration, ...] = tuple(
    Configuration(keep, budget) for budget in BUDGETS for keep in KEEPS
)


def everything_kept(tokens: int) -> Configuration:
    """The control: the pruned server keeps all ``tokens`` and must equal the stock server."""
    return Configuration("state", tokens)
