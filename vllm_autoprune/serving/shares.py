"""How many tokens each image of a request keeps, where the request says so.

Knows nothing about states: numbers in, numbers out.
"""

from __future__ import annotations

from collections.abc import Sequence


def shared(total: int, sizes: Sequence[int]) -> list[int]:
    """``total`` tokens over images of these sizes: evenly, earlier images taking the remainder.

    What an image is too small to use goes to the others, evenly again. The budgets add up to
    ``total``, or to all the tokens there are where that is less.
    """
    total = min(total, sum(sizes))
    left, level = total, 0
    for i, size in enumerate(sorted(sizes)):
        level = left // (len(sizes) - i)
        if size > level:
            break
        left -= size
    budgets = [min(size, level) for size in sizes]
    rest = total - sum(budgets)
    for i in [i for i, size in enumerate(sizes) if size > level][:rest]:
        budgets[i] += 1
    return budgets
