"""Run one attack on one server, with the same normal question before and after it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from benchmarks.server import Server
from tests.hostile.attack import SAME, Attack, Profile, Site
from tests.hostile.client import Client, Reply, distance
from tests.hostile.pictures import Picture

_SANE = Picture(0, 448, 448)
_EXCEPTION = re.compile(r"(^|[\] ])\w+(Error|Exception): .")
_GRACE = 10.0
"""Seconds in which a server whose engine has died ends."""


@dataclass(frozen=True)
class Outcome:
    """Result of one attack; it passes without problems. ``requests`` of it were answered."""

    attack: str
    backbone: str
    runner: str
    seconds: float
    problems: list[str]
    notes: list[str] = field(default_factory=list)
    requests: int = 0

    @property
    def verdict(self) -> str:
        """The result in one word."""
        return "BROKEN" if self.problems else "withstood"


def run_attack(
    attack: Attack, backbone: str, runner: str, get: Callable[[Profile], Server]
) -> Outcome:
    """Run an attack on the server of its profile, then check the server."""
    begun = time.monotonic()
    site = Site(backbone, lambda: Client(get(attack.profile)), lambda: Client(get("stock")))
    before = _ask_sane_question(site.client)
    problems: list[str] = []
    try:
        problems += attack.run(site)
    except (AssertionError, httpx.HTTPError, OSError, KeyError) as error:
        problems.append(f"{type(error).__name__}: {error}")
    problems += _problems_since(site.client, before)
    return Outcome(
        attack.name,
        backbone,
        runner,
        time.monotonic() - begun,
        problems,
        site.notes,
        sum(status > 0 for status in site.client.statuses),
    )


def _ask_sane_question(client: Client) -> Reply:
    reply = client.chat("what colour is the cat", _SANE)
    assert reply.status == 200, f"a normal request is refused before the attack: {reply}"
    return reply


def _problems_since(client: Client, before: Reply) -> list[str]:
    after = client.chat("what colour is the cat", _SANE)
    if after.status != 200:
        return [f"a normal request afterwards: {after}; {_last_words(client.server)}"]
    gap = distance(before.logprobs, after.logprobs)
    if gap > SAME:
        return [f"a normal request is answered otherwise than before, by {gap:.2f}"]
    return []


def _last_words(server: Server) -> str:
    """The last exception in the log of a dead engine."""
    deadline = time.monotonic() + _GRACE
    while server.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    ended = "the server has ended" if server.process.poll() is not None else "the server is up"
    causes = [
        line.rpartition("] ")[2].strip()
        for line in server.logged().splitlines()
        if _EXCEPTION.search(line) and "EngineCore encountered" not in line
    ]
    return f"{ended}: {(causes or ['no exception in its log'])[-1][-300:]}"
