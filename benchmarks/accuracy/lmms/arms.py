"""The servers that are compared: full, base policy and AutoPrune, each at an address of its own.

Knows nothing about benchmarks. lmms-eval sends no field of ours: its ``openai`` model takes from
``--gen_kwargs`` only what OpenAI itself knows, and keeps ``extra_body`` for videos and templates.
So what is pruned is decided by the server that is asked, not by the request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.accuracy.records import Case
from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

_ARM = re.compile(
    r"(?:(?P<full>full)|(?:(?P<base>\w+?)(?P<plus>\+autoprune)?)@(?P<budget>\d+))=(?P<url>https?://.+)"
)
_MEND = "write full=URL, cdpruner@64=URL or cdpruner+autoprune@64=URL"


@dataclass(frozen=True)
class Server:
    """A case and where it is served; ``url`` without ``/v1``."""

    case: Case
    url: str


def servers(arms: Sequence[str]) -> list[Server]:
    """Parse ``NAME=URL``; raises :class:`ConfigError` that lists every one that is wrong."""
    found, problems = list[Server](), list[Problem]()
    for arm in arms:
        match = _ARM.fullmatch(arm)
        if match is None or (not match["full"] and match["base"] not in BASE_POLICIES):
            problems.append(Problem(f"--arm {arm}", "is no arm", _MEND))
            continue
        url = match["url"].rstrip("/").removesuffix("/v1")
        found.append(Server(_case(match), url))
    names = [server.case.name for server in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    problems += [Problem(f"--arm {name}", "is given twice", "give it once") for name in twice]
    if not arms:
        problems.append(Problem("--arm", "is missing", _MEND))
    if problems:
        raise ConfigError("eval", problems)
    return found


def _case(match: re.Match[str]) -> Case:
    if match["full"]:
        return Case(name="full", arm="full", label="full")
    base, budget = match["base"], int(match["budget"])
    alone = f"{base}@{budget}"
    if match["plus"]:
        name = f"{base}+autoprune@{budget}"
        label = f"{base} + AutoPrune"
        return Case(name=name, arm="autoprune", label=label, budget=budget, base=alone)
    return Case(name=alone, arm="base", label=base, budget=budget)
