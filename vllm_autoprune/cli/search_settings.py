"""Settings of `search` from its options, and messages that name the option to correct."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_autoprune.errors import ConfigError, Problem

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from offline_search.dataset import Dataset
    from offline_search.settings import Settings

_FLAGS = {
    "budgets": "--budget",
    "proposer": "--proposer-model",
}
"""Flags that are not named like their field of the settings."""


def read_settings_and_data(options: argparse.Namespace) -> tuple[Settings, Dataset]:
    """Settings and data set of the search; raises :class:`ConfigError` with every problem."""
    from offline_search.dataset import read_dataset
    from offline_search.strategies import CODE_STRATEGIES, STRATEGIES
    from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

    problems = []
    served = [name for name in STRATEGIES if name not in CODE_STRATEGIES]
    for flag, value, known in (
        ("--strategy", options.strategy, served),
        ("--base-policy", options.base_policy, BASE_POLICIES),
        *(("--other-bases", name, BASE_POLICIES) for name in options.other_bases),
    ):
        if value not in known:
            problems.append(Problem(flag, f"{value!r} is not known", f"give {', '.join(known)}"))
    if problems:
        raise ConfigError("search", problems)
    proposer_name = _proposer_name(options)
    strategy = STRATEGIES[options.strategy](_build_settings({"proposer": proposer_name}))
    if strategy.uses_proposer and not proposer_name:
        what = f"{options.strategy} needs a language model"
        fix = "give --proposer-url, or one of autoprune+, tpe and random"
        raise ConfigError("search", [Problem("--strategy", what, fix)])
    settings = _build_settings(
        {
            "strategy": options.strategy,
            "rounds": options.rounds,
            "per_round": options.per_round,
            "base_policy": options.base_policy,
            "other_bases": tuple(options.other_bases),
            "budgets": tuple(options.budget),
            "objective": options.objective,
            "seed": options.seed,
            "space": options.space,
            "core": options.core,
            "race": options.race,
            "rank_at": options.rank_at,
            "library": options.library,
            "proposer": proposer_name if strategy.uses_proposer else "",
            "proposals_per_reply": _list_length(options, strategy.uses_proposer),
            "temperature": options.temperature,
        }
    )
    return settings, read_dataset(options.data, options.seed, options.images)


def _build_settings(values: Mapping[str, object]) -> Settings:
    """Settings with these fields; raises :class:`ConfigError` that names their flags."""
    from pydantic import ValidationError

    from offline_search.settings import Settings

    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        # A refused item of a tuple makes the tuple too short as well; options never give none.
        details = [one for one in error.errors(include_url=False) if one["type"] != "too_short"]
    raise ConfigError("search", [_describe_setting(detail, values) for detail in details])


def _describe_setting(detail: ErrorDetails, values: Mapping[str, object]) -> Problem:
    message = detail["msg"].removeprefix("Value error, ")
    # Pydantic locates what a whole model breaks nowhere, and an item of a tuple by its number.
    fields = [str(name) for name in detail["loc"][:1]] or _find_conflict(message, values)
    where = ", ".join(_FLAGS.get(name, f"--{name.replace('_', '-')}") for name in fields)
    demand = message.removeprefix("Input should be ")
    if demand != message:
        return Problem(where, f"{detail['input']!r} is refused", f"give a value that is {demand}")
    what, _, fix = message.partition(": ")
    return Problem(where, what, fix or f"leave {'one of them' if len(fields) > 1 else 'it'} out")


def _find_conflict(message: str, values: Mapping[str, object]) -> list[str]:
    """Fields whose defaults would end a conflict between fields, or else change its message."""
    left = {
        name: _find_message({other: value for other, value in values.items() if other != name})
        for name in values
    }
    ending = [name for name, other in left.items() if not other]
    return ending or [name for name, other in left.items() if other != message]


def _find_message(values: Mapping[str, object]) -> str:
    """First problem of settings with these fields; empty if there is none."""
    from pydantic import ValidationError

    from offline_search.settings import Settings

    try:
        Settings.model_validate(values)
    except ValidationError as error:
        return error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
    return ""


def _list_length(options: argparse.Namespace, uses_proposer: bool) -> int:
    """Proposals in a reply."""
    from offline_search.settings import DEFAULT_LIST, STRATEGIES_WITH_LISTS

    if options.proposals_per_reply is not None:
        return int(options.proposals_per_reply)
    return DEFAULT_LIST if uses_proposer and options.strategy in STRATEGIES_WITH_LISTS else 1


def _proposer_name(options: argparse.Namespace) -> str:
    """Name of the language model in the ledger; empty without one."""
    if options.proposer_url is None:
        if options.proposer_model:
            fix = "give --proposer-url, or leave it out"
            raise ConfigError("search", [Problem("--proposer-model", "has no endpoint", fix)])
        return ""
    if not options.proposer_model:
        fix = "name a model at --proposer-url"
        raise ConfigError("search", [Problem("--proposer-model", "is missing", fix)])
    return str(options.proposer_model)
