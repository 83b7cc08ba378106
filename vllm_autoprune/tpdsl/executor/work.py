"""Units of the cost model: an image's shape, work, and the milliseconds that it takes."""

from __future__ import annotations

from dataclasses import dataclass

MS_PER_CALL = 1e-3
MS_PER_NUMBER = 4e-7
MS_PER_PRODUCT = 1.75e-8
"""Rates of one core of the machine that the model was fitted on: a call of torch, one float32 read
and written, one multiply-add of a matrix product."""


@dataclass(frozen=True, slots=True)
class Shape:
    """An image of N tokens of width D, of which K are kept; Dv is the width of the tower."""

    tokens: int = 576
    budget: int = 192
    width: int = 4096
    tower: int = 1024


REFERENCE = Shape()
"""The image that states of requests are judged by: LLaVA-1.5's, with a third of it kept."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one atom: torch calls, numbers read or written, and multiplications."""

    calls: float = 0.0
    numbers: float = 0.0
    products: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.calls + other.calls,
            self.numbers + other.numbers,
            self.products + other.products,
        )

    @property
    def milliseconds(self) -> float:
        """Predicted time on one CPU core."""
        return (
            self.calls * MS_PER_CALL + self.numbers * MS_PER_NUMBER + self.products * MS_PER_PRODUCT
        )


def cosines_work(shape: Shape) -> Work:
    """Work of the cosines between all tokens."""
    n, d = shape.tokens, shape.width
    return Work(12, 3 * n * d + n * n, 0.65 * n * n * d)


def greedy_work(shape: Shape, steps: int) -> Work:
    """Work of greedy MAP: every step reads all earlier steps."""
    n = shape.tokens
    return Work(14 * steps, 8 * n * steps + n * steps * steps / 2, n * steps * steps / 2)


def farthest_work(tokens: int, steps: int) -> Work:
    """Work of farthest-point selection, given the distances."""
    return Work(4 + 5 * steps, 2 * tokens * steps, 0)


def centring_work(shape: Shape, *, scaled: bool) -> Work:
    """Work of subtracting the mean token, and of scaling by deviations."""
    return Work(12, (3 + 4 * scaled) * shape.tokens * shape.width)
