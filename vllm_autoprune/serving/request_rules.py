"""What requests may set for themselves, and within which bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, field_validator

from vllm_autoprune.serving.history import History
from vllm_autoprune.tpdsl.atoms.source import MAX_BUDGET, BudgetCall
from vllm_autoprune.tpdsl.cost import DEFAULT_COST

REQUESTS_FLAG = "--autoprune-requests"

Detail = Literal["low", "high"]
"""Detail levels that may have a budget; with ``auto``, or no level, an image has the server's
budget."""

DETAIL_LEVELS: tuple[Detail, ...] = get_args(Detail)


def _read_budget(value: object) -> BudgetCall | None:
    return None if value is None else BudgetCall.parse(value)


class DetailBudgets(BaseModel):
    """Budget of an image whose detail is ``low`` or ``high``; None if the level has no budget."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    _budgets = field_validator("*", mode="plain")(_read_budget)

    low: BudgetCall | None = None
    high: BudgetCall | None = None

    def as_dict(self) -> dict[str, BudgetCall]:
        """Budget of every level that has one, by level."""
        return {level: budget for level, budget in self if budget is not None}


Level = Literal["none", "budget", "shipped-states", "states"]
"""What requests may set: nothing; a budget, a control, or no pruning at all; also a state that
ships with the package; also any state. Each level includes the levels before it."""

LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Level of permission, and inclusive range of the budgets that requests may ask for.

    ``explicit`` is true if the operator set the flag: vLLM's own check of ``mm_processor_kwargs``
    then lets the plugin's entry pass, which otherwise needs ``--trust-request-mm-kwargs``. ``cost``
    bounds the predicted milliseconds of a request's state (:mod:`vllm_autoprune.tpdsl.cost`).
    ``detail`` has the budgets that any request may choose by ``image_url.detail``, at every level.
    ``recall`` is the number of tokens that later turns of a conversation recall if their request
    does not set it, and ``history`` says which images keep their core alone. ``total`` bounds what
    all images and videos of a request keep, without recalls; None is no bound.
    """

    level: Level = "budget"
    minimum: int = 1
    maximum: int = MAX_BUDGET
    explicit: bool = False
    cost: float = DEFAULT_COST
    detail: DetailBudgets = field(default_factory=DetailBudgets)
    recall: int = 0
    history: History | None = None
    total: int | None = None

    def allows(self, level: Level) -> bool:
        """Whether requests may set the fields that ``level`` adds."""
        return LEVELS.index(level) <= LEVELS.index(self.level)

    def __str__(self) -> str:
        if self.level == "none":
            return self.level
        return f"{self.level}:{self.minimum}-{self.maximum}"


DEFAULT_RULES = RequestRules()
