"""Named choices that a proposal is made of: at random, of parents, or known and clipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

NO_YES = ("no", "yes")
"""Options of whether a part is there."""

_STEP_WIDTH = 0.2
"""Standard deviation of the change of a number, as a share of the parameter's range."""

Choice = float | str


class ChoiceSource(Protocol):
    """Makes named choices; one name always has the same options or range."""

    def option(self, name: str, options: Sequence[str]) -> str:
        """One of several options."""

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        """A number between two inclusive bounds."""


@dataclass(frozen=True, slots=True)
class RandomSource:
    """Choices of one or several parents, some of them changed; uniform where no parent has one.

    With the probability ``rate`` an option is changed to any, and with twice that a number by a
    normally distributed step within its range.
    """

    rng: Random
    parents: Sequence[Mapping[str, Choice]] = ()
    rate: float = 0.0

    def option(self, name: str, options: Sequence[str]) -> str:
        """The option of a parent, or any."""
        value = self._inherit(name)
        if value is None or self.rng.random() < self.rate:
            return self.rng.choice(options)
        return str(value)

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        """The number of a parent or one near it, or any of its range."""
        value = self._inherit(name)
        if value is None and integer:
            return self.rng.randint(round(low), round(high))
        if value is None:
            return round(self.rng.uniform(low, high), 4)
        if self.rng.random() >= 2 * self.rate:
            return float(value)
        changed = min(
            high, max(low, float(value) + self.rng.gauss(0, _STEP_WIDTH * (high - low)))
        )
        return round(changed) if integer else round(changed, 4)

    def _inherit(self, name: str) -> Choice | None:
        choices = [parent[name] for parent in self.parents if name in parent]
        return self.rng.choice(choices) if choices else None


class ClippedChoices:
    """Choices that are known, clipped to their range; elsewhere the first option, or the middle."""

    def __init__(self, choices: Mapping[str, Choice]) -> None:
        self._choices = choices

    def option(self, name: str, options: Sequence[str]) -> str:
        """The known option."""
        value = str(self._choices.get(name))
        return value if value in options else options[0]

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        """The nearest number of the range."""
        value = min(high, max(low, float(self._choices.get(name, (low + high) / 2))))
        return round(value) if integer else value
