"""Named choices that make a proposal: drawn at random, inherited from parents, or given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

NO_YES = ("no", "yes")
"""Options for the presence of a part."""

_STEP_WIDTH = 0.2
"""Standard deviation of the change of a number, as a share of the parameter's range."""

Choice = float | str


class ChoiceSource(Protocol):
    """Source of named choices; a name always has the same options or range."""

    def option(self, name: str, options: Sequence[str]) -> str:
        """Choose one of ``options``."""

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        """Choose a number from ``low`` to ``high``, both included."""


@dataclass(frozen=True, slots=True)
class RandomSource:
    """Choices inherited from parents with random changes; uniform if no parent has the choice.

    An option is redrawn with probability ``rate``. A number is changed with probability
    2 ``rate``, by a normally distributed step within its range.
    """

    rng: Random
    parents: Sequence[Mapping[str, Choice]] = ()
    rate: float = 0.0

    def option(self, name: str, options: Sequence[str]) -> str:
        """A parent's option, or a random one."""
        value = self._inherit(name)
        if value is None or self.rng.random() < self.rate:
            return self.rng.choice(options)
        return str(value)

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        """A parent's number, one near it, or a random one of the range."""
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
    """Given choices, clipped to their range; the first option, or the middle, for other names."""

    def __init__(self, choices: Mapping[str, Choice]) -> None:
        self._choices = choices

    def option(self, name: str, options: Sequence[str]) -> str:
        """The given option, or the first."""
        value = str(self._choices.get(name))
        return value if value in options else options[0]

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        """The given number clipped to the range, or the middle of the range."""
        value = min(high, max(low, float(self._choices.get(name, (low + high) / 2))))
        return round(value) if integer else value
