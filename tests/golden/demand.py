"""Strictness of the comparison of a golden case, from its flags and its note.

A note marks a case as degenerate and states what still holds. Two phrases with numbers are parsed
here; with any other note only the validity of the output is checked.
"""

from __future__ import annotations

import re
from enum import Enum

from tests.golden.case import Case


class Demand(Enum):
    """Part of the output that must equal the published one."""

    ORDER = "order"
    SET = "set"
    SOUND = "sound"
    """Nothing: the right number of unique indices in range, and finite rows."""


def demand(case: Case) -> Demand:
    """Order if it is stable, else the set if that is; less for degenerate cases."""
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
