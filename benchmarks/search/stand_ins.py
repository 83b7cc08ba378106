"""Proposers that stand in for a language model: replies of earlier searches, and random ones.

Both choose a reply by a hash of request and seed, so that searches with them are repeatable.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

from pydantic import JsonValue

from offline_search.candidates.components import JsonObject
from offline_search.candidates.schema import definitions, reference_name
from offline_search.ledger import read_ledger
from offline_search.ledger.records import ReplyRecord
from offline_search.proposers.prompt import Messages
from offline_search.proposers.proposal_client import Reply
from vllm_autoprune.errors import SearchError


class RecordedProposer:
    """Proposer that returns replies of earlier searches to first attempts, and runs no model.

    The replies do not answer the prompt. Comparisons with it show how strategies use proposals,
    not what a model learns from the history.
    """

    def __init__(self, ledgers: Sequence[Path]) -> None:
        """Raises :class:`SearchError` if the ledgers hold no reply to a first attempt."""
        self._replies = [
            Reply(record.text, record.failure, record.cost)
            for ledger in ledgers
            for record in read_ledger(ledger)
            if isinstance(record, ReplyRecord) and record.attempt == "first"
        ]
        if not self._replies:
            raise SearchError(
                f"{', '.join(map(str, ledgers))}: no proposal or choice of a model is "
                "recorded -> give ledgers of searches in which a model made some"
            )

    def __len__(self) -> int:
        return len(self._replies)

    async def prepare(self) -> None:
        """Do nothing: recorded replies need no endpoint."""

    async def close(self) -> None:
        """Do nothing: no connection is open."""

    async def reply(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
        """One of the replies, chosen by request and seed."""
        return self._replies[_request_number(messages, seed) % len(self._replies)]


class RandomProposer:
    """Control for a language model: replies drawn at random from the JSON Schema of the request.

    All else is as with a language model that writes one proposal a reply.
    """

    name = "replies drawn at random"

    async def prepare(self) -> None:
        """Do nothing: there is no endpoint."""

    async def close(self) -> None:
        """Do nothing: no connection is open."""

    async def reply(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
        """A random reply; raises :class:`SearchError` for requests of programs."""
        if schema is None:
            raise SearchError(
                "a program cannot be drawn at random -> leave out strategies of programs"
            )
        return Reply(json.dumps(draw_json(schema, Random(_request_number(messages, seed)))))


def draw_json(schema: JsonObject, rng: Random) -> JsonValue:
    """A random value of a proposal's schema.

    Alternatives, lengths of lists, and numbers between their bounds are equally likely. A field
    that is not required is included with a probability of one half.
    """
    known = definitions({"$defs": {}, **schema})

    def draw(part: JsonValue) -> JsonValue:
        assert isinstance(part, dict)
        match part:
            case {"$ref": _}:
                return draw(known[reference_name(part)])
            case {"const": value}:
                return value
            case {"enum": [*options]} | {"anyOf": [*options]}:
                chosen = rng.choice(options)
                return draw(chosen) if "anyOf" in part else chosen
            case {"type": "object", "properties": dict(fields), "required": [*required]}:
                return {
                    name: draw(field)
                    for name, field in fields.items()
                    if name in required or rng.random() < 0.5
                }
            case {"type": "array", "prefixItems": [*items]}:
                return [draw(item) for item in items]
            case {"type": "array", "items": item, "minItems": int(least), "maxItems": int(most)}:
                return [draw(item) for _ in range(rng.randint(least, most))]
            case {"type": "integer", "minimum": int(low), "maximum": int(high)}:
                return rng.randint(low, high)
            case {
                "type": "number",
                "minimum": (int() | float()) as low,
                "maximum": (int() | float()) as high,
            }:
                return rng.uniform(low, high)
            case {"type": "boolean"}:
                return rng.random() < 0.5
            case {"type": "null"}:
                return None
        raise SearchError(f"{part}: not a part of a proposal's schema -> draw it in draw_json")

    return draw(schema)


def _request_number(messages: Messages, seed: int) -> int:
    request = f"{seed} {json.dumps(messages)}"
    return int.from_bytes(hashlib.sha256(request.encode()).digest()[:8], "big")
