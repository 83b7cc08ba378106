"""Proposer: a language model that answers a chat with text.

Knows nothing about states.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from offline_search.prompt import Messages
from offline_search.proposal import JsonObject
from offline_search.records import Cost


@dataclass(frozen=True, slots=True)
class Reply:
    """Text, or the failure that is left after all retries."""

    text: str | None
    failure: str = ""
    cost: Cost = field(default_factory=Cost)


class Proposer(Protocol):
    """Answers chats; never raises for what an endpoint does."""

    async def prepare(self) -> None:
        """Look whether the endpoint answers; raises :class:`ConfigError` where it never will."""

    async def reply(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
        """One reply; with a JSON Schema it follows that, as far as the endpoint can hold to it."""

    async def close(self) -> None:
        """Let go of connections."""
