"""Servers that prune by themselves, one for each case: full model, base policies and AutoPrune.

For servers whose requests may not bring states; otherwise one server serves every case.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.records import RESIZED, Case
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

_ARM = re.compile(
    r"(?:(?P<full>full)|(?:(?P<base>\w+?)(?P<plus>\+autoprune)?)@(?P<budget>\d+))=(?P<url>https?://.+)"
)
_RESIZED = "resized"
"""Name of the arm of a stock server that makes every image so small (``max_pixels``)."""
_FIX = "write full=URL, resized@64=URL, cdpruner@64=URL or cdpruner+autoprune@64=URL"


@dataclass(frozen=True)
class Server:
    """A case and the address that serves it, without ``/v1``."""

    case: Case
    url: str


def parse_servers(arms: Sequence[str]) -> list[Server]:
    """Parse ``NAME=URL``; raises :class:`ConfigError` with every argument that is wrong."""
    servers, problems = list[Server](), list[Problem]()
    for arm in arms:
        match = _ARM.fullmatch(arm)
        if match is None or not _is_known(match):
            problems.append(Problem(f"--arm {arm}", "is not a valid arm", _FIX))
            continue
        url = match["url"].rstrip("/").removesuffix("/v1")
        servers.append(Server(_case(match), url))
    names = [server.case.name for server in servers]
    repeated = sorted({name for name in names if names.count(name) > 1})
    problems += [Problem(f"--arm {name}", "is given twice", "give it once") for name in repeated]
    if not arms:
        fix = f"give --server-url, a server with --autoprune-requests states; or {_FIX}"
        problems.append(Problem("--arm", "is missing", fix))
    if problems:
        raise ConfigError("eval", problems)
    return servers


def _is_known(match: re.Match[str]) -> bool:
    if match["full"] or (match["base"] == _RESIZED and not match["plus"]):
        return True
    return match["base"] in BASE_POLICIES


def _case(match: re.Match[str]) -> Case:
    if match["full"]:
        return Case(name="full", arm="full", label="full")
    base, budget = match["base"], int(match["budget"])
    base_case = f"{base}@{budget}"
    if base == _RESIZED:
        return Case(name=base_case, arm="resized", label=RESIZED, budget=budget)
    if match["plus"]:
        name = f"{base}+autoprune@{budget}"
        label = f"{base} + AutoPrune"
        return Case(name=name, arm="autoprune", label=label, budget=budget, base=base_case)
    return Case(name=base_case, arm="base", label=base, budget=budget)
