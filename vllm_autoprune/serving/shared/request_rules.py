"""Permissions of requests: the parsed value of ``--autoprune-requests``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, get_args

from vllm_autoprune.errors import Problem
from vllm_autoprune.serving.shared.detail_budgets import NO_DETAIL_BUDGETS, DetailBudgets
from vllm_autoprune.tpdsl.cost import DEFAULT_COST
from vllm_autoprune.tpdsl.loading import suggest_name
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET

FLAG = "--autoprune-requests"

Level = Literal["none", "budget", "shipped-states", "states"]
"""What requests may set: nothing; a budget, a control, or no pruning at all; also a state that
ships with the package; also any state. Each level allows what the ones before it do."""

LEVELS: tuple[Level, ...] = get_args(Level)

_FORM = re.compile(r"(?P<level>[a-z-]+)(?::(?P<least>\d{1,6})-(?P<most>\d{1,6}))?")


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Level of permission, and the budgets of one image that requests may ask for, ends included.

    ``explicit`` where the operator gave the flag: vLLM's own check of ``mm_processor_kwargs`` then
    lets the plugin's entry pass, which otherwise needs ``--trust-request-mm-kwargs``. ``cost``
    bounds the predicted milliseconds of a request's state
    (:mod:`vllm_autoprune.tpdsl.cost`). ``detail`` has the budgets that any request
    may choose by ``image_url.detail``, at every level; ``recall`` is the number of tokens that
    later turns of a conversation recall where their request does not say it.
    """

    level: Level = "budget"
    minimum: int = 1
    maximum: int = MAX_BUDGET
    explicit: bool = False
    cost: float = DEFAULT_COST
    detail: DetailBudgets = NO_DETAIL_BUDGETS
    recall: int = 0

    def allows(self, level: Level) -> bool:
        """Whether requests may set the fields that a level adds."""
        return LEVELS.index(level) <= LEVELS.index(self.level)

    def contains(self, budget: int) -> bool:
        """Whether requests may ask for so many tokens of an image."""
        return self.minimum <= budget <= self.maximum

    def for_processed_inputs(self) -> RequestRules:
        """The rules of inputs that a client processed: without the flag they may set nothing.

        They do not pass vLLM's check of ``mm_processor_kwargs``, which protects such a server.
        """
        return self if self.explicit else replace(self, level="none")

    def __str__(self) -> str:
        if self.level == "none":
            return self.level
        return f"{self.level}:{self.minimum}-{self.maximum}"


DEFAULT_RULES = RequestRules()


def parse_rules(value: object, problems: list[Problem]) -> RequestRules:
    """Parse a setting's value, such as ``"shipped-states"`` or ``"budget:16-256"``.

    Appends to ``problems`` where the value is malformed.
    """
    if value is None:
        return DEFAULT_RULES
    match = _FORM.fullmatch(str(value).strip())
    level = next((name for name in LEVELS if match and name == match["level"]), None)
    if match is None or level is None:
        what = f"{str(value)[:80]!r} is not known"
        near = suggest_name(str(value).partition(":")[0], LEVELS)
        fix = f"{near} (with a range where wanted: budget:16-256)"
        problems.append(Problem(FLAG, what, fix))
        return RequestRules("none", explicit=True)
    least, most = int(match["least"] or 1), int(match["most"] or MAX_BUDGET)
    if not 1 <= least <= most <= MAX_BUDGET:
        what = f"{least}-{most} is no range of tokens"
        problems.append(Problem(FLAG, what, f"give two numbers from 1 to {MAX_BUDGET}, in order"))
    return RequestRules(level, least, most, explicit=True)
