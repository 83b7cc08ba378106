"""Split of an image's budget over its parts, the same in the API server and in the worker."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_autoprune.tpdsl.tokens import split_over_tiles


def split_over_parts(
    budget: int, sizes: Sequence[int], tiles: Sequence[int], first: int = 0
) -> tuple[int, ...]:
    """Split K over parts of ``sizes`` tokens: K / T for each of their ``tiles``.

    What does not divide goes to part number ``first`` and those after it, and surplus to the next
    part with room. If K is at least the number of tokens, every part keeps all of its tokens.
    """
    order = [(first + i) % len(sizes) for i in range(len(sizes))]
    shares = split_over_tiles(budget, sum(tiles))
    budgets, done = [0] * len(sizes), 0
    for part in order:
        budgets[part] = min(sum(shares[done : done + tiles[part]]), sizes[part])
        done += tiles[part]
    left = min(budget, sum(sizes)) - sum(budgets)
    for part in order:
        more = min(left, sizes[part] - budgets[part])
        budgets[part] += more
        left -= more
    return tuple(budgets)
