"""Parsers of single settings: each returns a value or appends problems with place and fix.

Whether settings fit the model, and each other, is checked in ``config``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from vllm_autoprune.errors import BudgetError, ConfigError, Problem, StateError
from vllm_autoprune.serving.shared.detail_budgets import FLAG as DETAIL_FLAG
from vllm_autoprune.serving.shared.detail_budgets import DetailBudgets, parse_detail_budgets
from vllm_autoprune.serving.shared.request_rules import FLAG as REQUESTS_FLAG
from vllm_autoprune.serving.shared.request_rules import RequestRules
from vllm_autoprune.serving.shared.text_tower import TextTower, read_text_tower
from vllm_autoprune.tpdsl.cost import DEFAULT_COST, FLAG
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET, materialize
from vllm_autoprune.tpdsl.state import PruningState

SETTINGS = (
    "state",
    "budget",
    "text_tower",
    "feature_cache_gb",
    "requests",
    "detail",
    "recall",
    "request_cost",
)
DEFAULT_CACHE_GB = 0.25
MAX_COST = 1e6


def read_state(value: object, problems: list[Problem]) -> PruningState | None:
    """The state of a file, a shipped name, a dictionary, or a state object."""
    if value is None:
        what = "no state is given, and the other settings mean nothing without one"
        problems.append(Problem("--autoprune-state", what, "give a file or a shipped name"))
        return None
    if isinstance(value, PruningState):
        return value
    try:
        return load_state(_as_json(value) if isinstance(value, Mapping) else str(value))
    except StateError as error:
        for p in error.problems:
            where = (
                f"--autoprune-state {str(value)[:255]}" if not isinstance(value, Mapping) else ""
            )
            problems.append(Problem(_locate(where, p), p.what, p.fix))
        return None


def _locate(setting: str, problem: Problem) -> str:
    """The setting that a problem is in, with the problem's JSON pointer where it has one."""
    return f"{setting}#{problem.where}" if problem.where else setting


def _as_json(value: Mapping[object, object]) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:  # a dictionary holds anything
        what = f"not JSON: {str(error)[:200]}"
        fix = "give a dictionary such as json.load returns"
        raise StateError("state", [Problem("", what, fix)]) from None


def read_budget(value: object, state: PruningState | None, problems: list[Problem]) -> int | None:
    """K of the setting, or of the state where there is none; None where it is invalid."""
    flag, budget = "--autoprune-budget", None
    if value is not None:
        try:
            budget = int(str(value))
        except ValueError:
            what = f"{value!r} is not a whole number"
            problems.append(Problem(flag, what, "give the number of tokens to keep, such as 64"))
            return None
    if state is None:
        if budget is not None and budget < 1:
            what = f"K = {budget} is not a number of tokens"
            problems.append(Problem(flag, what, "give 1 or more"))
        return None
    try:
        return materialize(state, budget).budget
    except BudgetError as error:
        problems += [
            Problem(_locate(flag if budget is not None else "state", p), p.what, p.fix)
            for p in error.problems
        ]
        return None


def read_detail_budgets(
    value: object, state: PruningState | None, rules: RequestRules, problems: list[Problem]
) -> DetailBudgets:
    """Budgets for ``image_url.detail``, each possible with the state and allowed by the rules."""
    budgets = parse_detail_budgets(value, problems)
    for level, budget in budgets.as_dict().items():
        if budget > rules.maximum:
            what = f"{level} = {budget}, and {REQUESTS_FLAG} allows {rules.maximum} at most"
            problems.append(Problem(DETAIL_FLAG, what, "lower the budget, or raise the range"))
            continue
        try:
            if state is not None:
                materialize(state, budget)
        except BudgetError as error:
            problems += [
                Problem(_locate(f"{DETAIL_FLAG} {level}", p), p.what, p.fix) for p in error.problems
            ]
    return budgets


def read_recall(value: object, rules: RequestRules, problems: list[Problem]) -> int:
    """Tokens of a conversation's images that each later turn without an image recalls."""
    text = str(value).strip()
    if value is None:
        return 0
    if not text.isdecimal() or int(text) > min(rules.maximum, MAX_BUDGET):
        what = f"{text[:80]!r} is not a number of tokens that requests may keep"
        fix = f"give 0 to {min(rules.maximum, MAX_BUDGET)}"
        problems.append(Problem("--autoprune-recall", what, fix))
        return 0
    return int(text)


def read_request_cost(value: object, problems: list[Problem]) -> float:
    """Predicted milliseconds that one selection by a state of a request may take."""
    try:
        cost = DEFAULT_COST if value is None else float(str(value))
    except ValueError:
        cost = -1.0
    if not 0 < cost <= MAX_COST:
        what = f"{value!r} is not a number of milliseconds"
        problems.append(Problem(FLAG, what, f"give a number above 0, at most {MAX_COST:.0f}"))
        return DEFAULT_COST
    return cost


def read_tower(value: object, problems: list[Problem]) -> TextTower | None:
    """Description of a text tower's checkpoint."""
    if value is None:
        return None
    try:
        return read_text_tower(str(value))
    except ConfigError as error:
        problems += error.problems
        return None


def read_cache_bytes(value: object, problems: list[Problem]) -> int:
    """Bytes of the feature cache on each worker."""
    try:
        size = DEFAULT_CACHE_GB if value is None else float(str(value))
    except ValueError:
        size = -1.0
    if not 0 <= size <= 1024:
        what = f"{value!r} is not a size in GB"
        fix = "give a number from 0 to 1024"
        problems.append(Problem("--autoprune-feature-cache-gb", what, fix))
        return 0
    return int(size * (1 << 30))
