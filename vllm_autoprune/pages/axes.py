"""Axes of a chart: ranges, linear or logarithmic, with ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Scale = Literal["linear", "log"]

_TICKS = 6
"""About as many ticks as an axis has."""
_MARGIN = 0.04
"""Share of an axis that stays free beyond the outermost values."""


@dataclass(frozen=True)
class Axis:
    """An axis from ``low`` to ``high``."""

    low: float
    high: float
    scale: Scale = "linear"

    def share(self, value: float) -> float:
        """Position of a value, 0 at the low end and 1 at the high end."""
        low, high, at = self._map(self.low), self._map(self.high), self._map(value)
        return (at - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round numbers within the axis."""
        if self.scale == "log" and self.high >= 4 * self.low:
            return _thin_out([v for v in _log_steps(self.low) if self.low <= v <= self.high], self)
        step = _round_step((self.high - self.low) / _TICKS)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(number * step, 12) for number in range(first, last + 1)]

    def labelled_ticks(self) -> list[tuple[str, float]]:
        """Ticks with their labels."""
        ticks = self.ticks()
        labels = map(format_tick, ticks) if self.scale == "log" else format_ticks(ticks)
        return list(zip(labels, ticks, strict=True))

    def _map(self, value: float) -> float:
        return math.log10(value) if self.scale == "log" else value


def fit_axis(
    values: Iterable[float],
    scale: Scale = "linear",
    *,
    zero: bool = False,
    most: float = math.inf,
) -> Axis:
    """The axis on which all values are visible; ``zero``: a linear axis that includes 0.

    A linear axis does not go beyond ``most``, which no value can exceed.

    A logarithmic axis shows values above 0; where there are none, the axis is linear.
    """
    usable = [value for value in values if math.isfinite(value) and (scale != "log" or value > 0)]
    if not usable:
        return Axis(0.0, 1.0)
    low, high = min(usable), max(usable)
    if scale == "log":
        factor = max((high / low) ** _MARGIN, 1.05)
        return Axis(low / factor, high * factor, "log")
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    margin = _MARGIN * (high - low) or abs(high) * _MARGIN or 1.0
    return Axis(low if zero and low == 0.0 else low - margin, min(high + margin, most))


def format_tick(value: float) -> str:
    """A tick's label: at most three significant digits beyond the zeros, ``,`` by thousands."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_ticks(ticks: Sequence[float]) -> list[str]:
    """Labels of the ticks of a linear axis, with the same decimals for all but 0."""
    texts = [format_tick(tick) for tick in ticks]
    decimals = max((len(text.partition(".")[2]) for text in texts if "e" not in text), default=0)
    if not decimals:
        return texts
    return [
        f"{tick:.{decimals}f}" if tick and "e" not in text else text
        for tick, text in zip(ticks, texts, strict=True)
    ]


def _round_step(step: float) -> float:
    """The next larger number of the form 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= step * (1 - 1e-9))


def _log_steps(low: float) -> Iterator[float]:
    power = math.floor(math.log10(low))
    for exponent in range(power, power + 20):
        for digit in (1, 2, 5):
            yield float(f"{digit}e{exponent}")


def _thin_out(ticks: list[float], axis: Axis) -> list[float]:
    """Only powers of ten where 1, 2 and 5 would be too many."""
    if len(ticks) <= 2 * _TICKS:
        return ticks
    return [tick for tick in ticks if f"{tick:e}".startswith("1.0")]
