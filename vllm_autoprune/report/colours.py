"""Colours of the pictures: a ramp for heat, and marks that colour-blind readers can tell apart.

Knows nothing about what is drawn in them.
"""

from __future__ import annotations

from collections.abc import Sequence

Colour = tuple[int, int, int]

PAPER: Colour = (255, 255, 255)
INK: Colour = (28, 32, 40)
QUIET: Colour = (98, 105, 118)
STAYED: Colour = (255, 255, 255)
LEFT: Colour = (230, 97, 0)
ENTERED: Colour = (26, 208, 170)

RAMP: tuple[Colour, ...] = (
    (10, 8, 38),
    (66, 18, 105),
    (130, 32, 112),
    (194, 56, 84),
    (238, 106, 44),
    (250, 180, 40),
    (253, 252, 190),
)
"""Dark to light, so that it reads in grey as well."""


def heat(value: float) -> Colour:
    """The ramp at 0..1; what lies outside is clamped."""
    place = min(max(value, 0.0), 1.0) * (len(RAMP) - 1)
    step = min(int(place), len(RAMP) - 2)
    share = place - step
    red, green, blue = (
        round(low + share * (high - low))
        for low, high in zip(RAMP[step], RAMP[step + 1], strict=True)
    )
    return red, green, blue


def spread(values: Sequence[float]) -> list[float]:
    """Values stretched to 0..1; all 0 where they are alike or none is finite."""
    finite = [value for value in values if abs(value) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    if high - low < 1e-12:
        return [0.0] * len(values)
    # NaN compares false with everything, and is shown as the lowest.
    return [(value - low) / (high - low) if low <= value <= high else 0.0 for value in values]


def css(colour: Colour) -> str:
    """As style sheets write it."""
    return "#{:02x}{:02x}{:02x}".format(*colour)
