"""How much of a golden case may be demanded: its flags and its note decide.

A note marks a case as degenerate. It then says in words what still holds; the two phrases that
have figures in them are read here, everything else leaves only that the outcome is sound.
"""

from __future__ import annotations

import re
from enum import Enum

from tests.golden.case import Case


class Demand(Enum):
    """What has to equal the published outcome."""

    ORDER = "order"
    SET = "set"
    SOUND = "sound"
    """Nothing: the right number of unique indices in range, and finite rows."""


def demand(case: Case) -> Demand:
    """Order where nothing is degenerate and the order is stable, else the set where that is."""
    if not case.note and case.recipe.get("stable_order", True):
        return Demand.ORDER
    return Demand.SET if case.recipe.get("stable_set", False) else Demand.SOUND


def residual_bound(case: Case) -> float | None:
    """The X of "before the first index whose float64 residual <= X", where the note says so."""
    actual = re.search(r"residual\s*<=\s*([0-9.eE+-]*[0-9])", case.note)
    return None if actual is None else float(actual[1])


def first_picks(case: Case) -> int | None:
    """The n of "the first n picks up to duplicate classes", where the note says so."""
    actual = re.search(r"first (\d+) picks", case.note)
    return None if actual is None else int(actual[1])
