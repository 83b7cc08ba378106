"""Budgets for levels of ``image_url.detail``: the parsed value of ``--autoprune-detail``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from vllm_autoprune.errors import Problem

FLAG = "--autoprune-detail"

Detail = Literal["low", "high"]
"""Levels with a budget; with ``auto``, or no level, an image has the server's own budget."""

LEVELS: tuple[Detail, ...] = get_args(Detail)


@dataclass(frozen=True, slots=True)
class DetailBudgets:
    """K of an image whose detail is ``low`` or ``high``; None where the operator gives no K."""

    low: int | None = None
    high: int | None = None

    def budget(self, detail: Detail | None) -> int | None:
        """K of an image with this detail; None for the server's own budget."""
        return None if detail is None else self.as_dict().get(detail)

    def as_dict(self) -> dict[Detail, int]:
        """K of every level that has one."""
        pairs: tuple[tuple[Detail, int | None], ...] = (("low", self.low), ("high", self.high))
        return {level: budget for level, budget in pairs if budget is not None}

    @property
    def largest(self) -> int:
        """The largest K of any level; 0 if there is none."""
        return max(self.as_dict().values(), default=0)


NO_DETAIL_BUDGETS = DetailBudgets()


def parse_detail_budgets(value: object, problems: list[Problem]) -> DetailBudgets:
    """Parse a setting's value: ``"low=64,high=256"``, or a mapping with the same content.

    Appends to ``problems`` what is malformed; levels with a problem get no budget.
    """
    if value is None:
        return NO_DETAIL_BUDGETS
    pairs = list(value.items()) if isinstance(value, Mapping) else _split(str(value))
    budgets: dict[Detail, int] = {}
    for name, given in pairs:
        level = next((level for level in LEVELS if level == name), None)
        if level is None:
            what = f"{str(name)[:80]!r} is no level of detail with a budget"
            problems.append(Problem(FLAG, what, "give low=64,high=256, or one of the two"))
        elif level in budgets:
            problems.append(Problem(FLAG, f"{level} is given twice", "give it once"))
        elif (budget := _parse_budget(given)) is None:
            what = f"{level} = {str(given)[:80]!r} is not a number of tokens"
            problems.append(Problem(FLAG, what, f"give 1 or more, such as {level}=64"))
        else:
            budgets[level] = budget
    if not pairs:
        problems.append(Problem(FLAG, "gives no budget", "give low=64,high=256"))
    result = DetailBudgets(**budgets)
    if result.low is not None and result.high is not None and result.low > result.high:
        what = f"low = {result.low} keeps more tokens than high = {result.high}"
        problems.append(Problem(FLAG, what, "give low the smaller budget"))
    return result


def _split(text: str) -> list[tuple[str, str]]:
    parts = (entry.partition("=") for entry in text.split(","))
    return [(name.strip(), given.strip()) for name, _, given in parts]


def _parse_budget(given: object) -> int | None:
    try:
        budget = int(str(given))
    except ValueError:
        return None
    return budget if budget >= 1 else None
