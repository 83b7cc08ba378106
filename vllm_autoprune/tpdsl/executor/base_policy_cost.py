"""Cost model of base policies, on inputs that are given."""

from __future__ import annotations

from dataclasses import replace

from vllm_autoprune.tpdsl.executor.work import (
    Shape,
    Work,
    centring_work,
    cosines_work,
    farthest_work,
    greedy_work,
)

WORDS = 16
"""Word tokens of a question, in the cost of policies that cover them."""


def _coverage(shape: Shape, rows: int) -> Work:
    """Work of greedy coverage: every step reads how well each token covers each row.

    The degrees of one image stay in the cache, so a number takes less than elsewhere.
    """
    return Work(14 * shape.budget, 0.7 * shape.tokens * rows * shape.budget)


def _tower_cosines(shape: Shape) -> Work:
    return cosines_work(replace(shape, width=shape.tower))


def base_policy_work(name: str, shape: Shape) -> Work:
    """Work of a base policy on given inputs."""
    n, k, d = shape.tokens, shape.budget, shape.tower
    match name:
        case "cen_divprune":
            geometry = (
                centring_work(shape, scaled=True) + cosines_work(shape) + Work(20, 12 * n * n)
            )
            return geometry + Work(40 * k, 12 * n * k)
        case "cen_cdpruner":
            geometry = centring_work(shape, scaled=True) + cosines_work(shape)
            return geometry + Work(20, 4 * n * d) + greedy_work(shape, k)
        case "scope":
            return _tower_cosines(shape) + _coverage(shape, n)
        case "mmtok":
            return _tower_cosines(shape) + Work(30, 6 * n * n) + _coverage(shape, n + WORDS)
        case "prunesid":
            # In float64: the Gram matrix, and about 9 n^3 of an eigendecomposition.
            solved = Work(20, 12 * n * d, 2 * n * n * d + 18 * n**3)
            return _tower_cosines(shape) + solved + Work(4 * n, 12 * n * n)
        case "holov":
            return Work(60 + 45 * k, 40 * n)
        case "fsr":
            chosen = cosines_work(shape) + Work(40 + 16 * k, 12 * n * n + 8 * n * k)
            return chosen + Work(40, 8 * n * k + 3 * n * shape.width, n * k * shape.width)
        case "idpruner":
            return cosines_work(shape) + Work(30 + 50 * k, 6 * n * n + 12 * n * k)
        case "cdpruner":
            return Work(20, 4 * n * d) + greedy_work(shape, k)
        case "divprune":
            gram = Work(10, 3 * n * shape.width + 8 * n * n, n * n * shape.width)
            return gram + farthest_work(n, k)
        case "visionzip":
            return Work(60, 6 * n * d + 2 * n * k, n * k * d / 3)
        case "prumerge_plus":
            return Work(80, 8 * n * d + 30 * n * k, 2 * n * k * d)
        case "trim":
            return Work(40, 6 * n * d)
        case "dart":
            return Work(400, 500 * n + 3 * n * shape.width)
    return Work(40, 256 * n * 8)  # by attention of the language model's first layers
