"""Proposer that returns replies recorded by earlier searches, instead of running a model.

The reply is chosen by a hash of request and seed: searches are repeatable, but the replies do not
depend on what the prompt says. Comparisons with it show how strategies use proposals, not what a
model learns from the history.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from offline_search.candidates.components import JsonObject
from offline_search.ledger import read_ledger
from offline_search.ledger.records import ReplyRecord
from offline_search.proposers.prompt import Messages
from offline_search.proposers.proposal_client import Reply
from vllm_autoprune.errors import SearchError


class RecordedProposer:
    """Proposer that draws from the first replies of earlier searches."""

    def __init__(self, ledgers: Sequence[Path]) -> None:
        """Raises :class:`SearchError` if the ledgers hold no reply."""
        self._replies = [
            Reply(record.text, record.failure, record.cost)
            for ledger in ledgers
            for record in read_ledger(ledger)
            if isinstance(record, ReplyRecord) and record.attempt == "first"
        ]
        if not self._replies:
            raise SearchError(
                f"{', '.join(map(str, ledgers))}: no reply is recorded -> give ledgers of searches "
                "with a proposer"
            )

    def __len__(self) -> int:
        return len(self._replies)

    async def prepare(self) -> None:
        """Does nothing."""

    async def close(self) -> None:
        """Does nothing."""

    async def reply(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
        """One of the replies, chosen by request and seed."""
        request = f"{seed} {json.dumps(messages)}"
        index = int.from_bytes(hashlib.sha256(request.encode()).digest()[:8], "big")
        return self._replies[index % len(self._replies)]
