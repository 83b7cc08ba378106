"""What requests may set about pruning: ``--autoprune-requests``, as data.

Knows nothing about how a request says it, nor about what it then gets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from vllm_autoprune.errors import Problem
from vllm_autoprune.tpdsl.executor.materialize import MAX_BUDGET
from vllm_autoprune.tpdsl.executor.state_cost import DEFAULT_COST

FLAG = "--autoprune-requests"

Level = Literal["none", "budget", "policies", "states"]
"""Each allows what the ones before it do: nothing; a budget, a control, or no pruning at all; a
policy that ships with the package; any state."""

LEVELS: tuple[Level, ...] = get_args(Level)

_FORM = re.compile(r"(?P<level>[a-z]+)(?::(?P<least>\d{1,6})-(?P<most>\d{1,6}))?")


@dataclass(frozen=True, slots=True)
class RequestRules:
    """The level, and the tokens of one image that a request may ask for, both ends included.

    ``stated`` where the operator said so: vLLM's own check of ``mm_processor_kwargs`` then lets
    our entry pass. Otherwise it needs ``--trust-request-mm-kwargs``. ``cost`` is the most that a
    state of a request may cost, in predicted ms (:mod:`vllm_autoprune.tpdsl.executor.state_cost`).
    """

    level: Level = "budget"
    least: int = 1
    most: int = MAX_BUDGET
    stated: bool = False
    cost: float = DEFAULT_COST

    def allows(self, level: Level) -> bool:
        """Whether requests may set what belongs to a level."""
        return LEVELS.index(level) <= LEVELS.index(self.level)

    def contain(self, budget: int) -> bool:
        """Whether requests may ask for so many tokens of an image."""
        return self.least <= budget <= self.most

    def __str__(self) -> str:
        if self.level == "none":
            return self.level
        return f"{self.level}:{self.least}-{self.most}"


UNSTATED = RequestRules()


def read_rules(value: object, problems: list[Problem]) -> RequestRules:
    """The rules in a setting's value, such as ``"policies"`` or ``"budget:16-256"``.

    Appends a problem where there are none in it.
    """
    if value is None:
        return UNSTATED
    found = _FORM.fullmatch(str(value).strip())
    level = next((known for known in LEVELS if found and known == found["level"]), None)
    if found is None or level is None:
        what = f"{str(value)[:80]!r} is not known"
        fix = f"give one of {', '.join(LEVELS)}, with a range where wanted: budget:16-256"
        problems.append(Problem(FLAG, what, fix))
        return RequestRules("none", stated=True)
    least, most = int(found["least"] or 1), int(found["most"] or MAX_BUDGET)
    if not 1 <= least <= most <= MAX_BUDGET:
        what = f"{least}-{most} is no range of tokens"
        problems.append(Problem(FLAG, what, f"give two numbers from 1 to {MAX_BUDGET}, in order"))
    return RequestRules(level, least, most, stated=True)
