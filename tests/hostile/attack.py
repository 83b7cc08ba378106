"""Attacks: a registry of functions that send hostile requests and report problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tests.hostile.client import Client, Reply, distance
from tests.hostile.pictures import Picture

Profile = Literal["default", "uncached", "trusting", "split", "stock"]
"""Which server: ``default`` lets requests bring states; ``uncached`` has both of vLLM's caches off,
the endpoints for tokens on, and lets requests set nothing; ``trusting`` lets them set arguments of
the processor too, as ``stock`` does, which has no state; ``split`` has a state with a core, budgets
by ``image_url.detail`` and the endpoints for tokens."""

PRUNED: Sequence[Profile] = ("default", "uncached", "trusting", "split")
"""Profiles of servers with a state."""

QUESTION = "what colour is the cat on the left"
SMALL, LARGE = (56, 56), (448, 448)
"""Sizes whose number of visual tokens differs wherever a backbone has any that do."""

SAME = 0.15
"""Mean difference of log-probabilities up to which two answers are the same.

Batches and cached prefixes round bfloat16 differently, by some hundredths; another image of a tiny
random model differs by several times that."""


@dataclass
class Site:
    """Target of an attack: a backbone, and clients of its servers.

    ``open_client`` and ``open_stock`` start the server anew if its engine is dead. ``notes`` are
    figures that an attack reports in addition to problems.
    """

    backbone: str
    open_client: Callable[[], Client]
    open_stock: Callable[[], Client]
    words: str = QUESTION
    notes: list[str] = field(default_factory=list)
    client: Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = self.open_client()

    def restart(self) -> Client:
        """Start both servers again after a request that ended their engines.

        Replaces the client, and returns that of the stock server.
        """
        statuses, self.client = self.client.statuses, self.open_client()
        self.client.statuses.extend(statuses)
        return self.open_stock()

    def note(self, text: str) -> None:
        """Report a figure."""
        self.notes.append(text)

    def ask(self, *pictures: Picture, **more: object) -> Reply:
        """Ask the site's question about pictures."""
        return self.client.chat(self.words, *pictures, **more)


Run = Callable[[Site], Iterable[str]]


@dataclass(frozen=True)
class Attack:
    """One attack: ``run`` yields problems; attacks marked ``quick`` also run in pytest."""

    name: str
    summary: str
    profile: Profile
    run: Run
    quick: bool
    backbones: Sequence[str]


ATTACKS: dict[str, Attack] = {}
BACKBONES = ("qwen2_5_vl", "llava_next", "llava")


def attack(
    profile: Profile = "default", quick: bool = True, backbones: Sequence[str] = BACKBONES
) -> Callable[[Run], Run]:
    """Register a function as an attack, with its name and docstring as description."""

    def register(run: Run) -> Run:
        name = run.__name__
        summary = (run.__doc__ or "").strip().partition("\n")[0]
        ATTACKS[name] = Attack(name, summary, profile, run, quick, backbones)
        return run

    return register


def server_errors(*replies: Reply) -> Iterable[str]:
    """A problem for each reply that is a server error or missing."""
    for reply in replies:
        if reply.status >= 500 or reply.status == 0:
            yield str(reply)


def unlike(name: str, reply: Reply, *accepted: Reply) -> Iterable[str]:
    """A problem for an answered reply that equals none of the references."""
    yield from server_errors(reply)
    if reply.status == 200:
        gap = min(distance(reply.logprobs, other.logprobs) for other in accepted)
        if gap > SAME:
            yield f"{name}: the answer differs from the expected one by {gap:.2f}"
