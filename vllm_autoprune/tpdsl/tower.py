"""Cells of a picture that leave a vision tower after part of its layers, by their hidden states.

The rest of the tower costs less by their share, or more, because attention is quadratic. How many
leave follows from the size of the picture alone, and which ones never depends on a question.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

from pydantic import Field, ValidationError
from torch import Tensor

from vllm_autoprune.errors import BudgetError, StateError
from vllm_autoprune.ops.rowwise import rank_descending
from vllm_autoprune.tpdsl.atoms.source import Budget, BudgetCall
from vllm_autoprune.tpdsl.registry import StatePart

VERSION = 1
"""Version of the rules that choose the cells that stay: part of every cache identity."""

TOWER_FIX = 'give the share that stays @ the depth, as in "2/3@1/3" or "2/3:64-4096@33%", or "none"'

Criterion = Literal["difference"]
"""What ranks cells: ``difference``, the distance of a cell's hidden state from the mean cell."""

_PATTERN = re.compile(
    r"(?P<cells>[^@]{1,32})@(?:(\d{1,3}/\d{1,3})|(\d{1,2}(?:\.\d{1,2})?)%)", re.ASCII
)


class Tower(StatePart):
    """Extension: drop cells of a picture after part of the vision tower's layers.

    A picture of which K tokens or more would have to be dropped keeps all of its cells.
    """

    cells: Budget = Field(description="how many cells stay: a share within bounds")
    depth: float = Field(
        ge=0.01,
        le=0.99,
        description="share of the tower's layers that every cell passes",
    )
    criterion: Criterion = Field(
        default="difference",
        description="cells that stay: those whose hidden states differ most from their mean",
    )

    @classmethod
    def parse(cls, value: object, where: str) -> Tower | None:
        """Parse ``2/3@1/3``, the share that stays and the depth, or an object; ``none`` gives None.

        Raises :class:`StateError`.
        """
        if isinstance(value, Tower):
            return value
        fields: object = value
        try:
            if isinstance(value, str):
                if value == "none":
                    return None
                match = _PATTERN.fullmatch(value.strip())
                fields = match and {
                    "cells": BudgetCall.parse(match["cells"]),
                    "depth": float(Fraction(match[2] or Fraction(match[3]) / 100)),
                }
            return cls.model_validate(fields)
        except (ValidationError, BudgetError, ZeroDivisionError):
            what = f"{str(value)[:40]!r} is no rule for cells inside the tower"
            raise StateError.of(where, what, TOWER_FIX, subject="tower") from None

    def __str__(self) -> str:
        depth = Fraction(self.depth).limit_denominator(1000)
        return f"{self.cells.rule()}@{depth}"

    def count_cells(self, encoded: int) -> int:
        """Number of cells that stay of ``encoded`` cells of a picture."""
        return min(encoded, self.cells.tokens_kept(encoded))


def keep_cells(states: Tensor, count: int, criterion: Criterion) -> Tensor:
    """Indices ``(count,)`` ascending of the cells that stay, of one picture.

    ``states`` ``(M, D)`` float32 are the hidden states of the cells. Ties go to the lower index.
    """
    assert criterion == "difference"
    distance = (states - states.mean(dim=0)).square().sum(dim=1)
    return rank_descending(distance)[:count].sort().values
