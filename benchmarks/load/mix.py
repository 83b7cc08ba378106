"""A discrete distribution: values, each with a weight.

Knows nothing about what the values stand for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, TypeVar

import numpy as np
from pydantic import AfterValidator

T = TypeVar("T")


def _checked(mix: tuple[tuple[T, float], ...]) -> tuple[tuple[T, float], ...]:
    if not mix or any(not (math.isfinite(weight) and weight > 0) for _, weight in mix):
        raise ValueError("a mix needs at least one value, and weights above 0")
    return mix


WholeMix = Annotated[tuple[tuple[int, float], ...], AfterValidator(_checked)]
"""Whole numbers with their weights, such as ``((480, 1.0), (640, 2.0))``."""

TextMix = Annotated[tuple[tuple[str, float], ...], AfterValidator(_checked)]
"""Words with their weights, such as ``(("4/3", 2.0), ("1/1", 1.0))``."""


def pick(mix: tuple[tuple[T, float], ...], generator: np.random.Generator) -> T:
    """One value, drawn by weight."""
    weights = np.array([weight for _, weight in mix])
    return mix[int(generator.choice(len(mix), p=weights / weights.sum()))][0]


def parsed(text: str, convert: Callable[[str], T]) -> tuple[tuple[T, float], ...]:
    """A mix as the command line writes it: ``480=1,640=2``; a weight that is left out is 1."""
    mix = []
    for part in text.split(","):
        value, _, weight = part.partition("=")
        mix.append((convert(value.strip()), float(weight or 1)))
    return tuple(mix)


def spoken(mix: tuple[tuple[T, float], ...]) -> str:
    """The mix as the command line writes it."""
    return ",".join(f"{value}={weight:g}" for value, weight in mix)
