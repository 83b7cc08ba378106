"""Replies that a proposer once gave, given again: a comparison without a language model running.

Knows nothing about states. Which reply is given follows from the request and its seed, so searches
are repeatable, but not from what the history says: a recorded model cannot learn. Figures made with
it tell what the strategies do with proposals, not what a model would have proposed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from offline_search.ledger import read
from offline_search.prompt import Messages
from offline_search.proposal import JsonObject
from offline_search.proposers.protocol import Reply
from offline_search.records import Replied
from vllm_autoprune.errors import SearchError


class RecordedProposer:
    """First replies of earlier searches."""

    def __init__(self, ledgers: Sequence[Path]) -> None:
        """Raises :class:`SearchError` where the ledgers hold no reply."""
        self._replies = [
            Reply(record.text, record.failure, record.cost)
            for ledger in ledgers
            for record in read(ledger)
            if isinstance(record, Replied) and record.attempt == "first"
        ]
        if not self._replies:
            raise SearchError(
                f"{', '.join(map(str, ledgers))}: no reply is recorded -> give ledgers of searches "
                "with a proposer"
            )

    def __len__(self) -> int:
        return len(self._replies)

    async def prepare(self) -> None:
        """Nothing to look for."""

    async def close(self) -> None:
        """Nothing to let go of."""

    async def reply(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
        """One of the replies, by request and seed."""
        request = f"{seed} {json.dumps(messages)}"
        place = int.from_bytes(hashlib.sha256(request.encode()).digest()[:8], "big")
        return self._replies[place % len(self._replies)]
