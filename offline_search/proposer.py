"""Proposals by a language model; replies are recorded by the request's place in the search."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Protocol

from offline_search.candidates import Draft
from offline_search.components import JsonObject
from offline_search.ledger import (
    Attempt,
    Clock,
    Cost,
    Ledger,
    ReplyRecord,
    select_records,
)
from offline_search.prompt import Messages, repair_prompt
from offline_search.replies import (
    MAX_REPLY_CHARACTERS,
    parse_reply,
    remove_thoughts,
    reply_schema,
)
from offline_search.settings import Settings
from vllm_autoprune.errors import Problem, SearchError


@dataclass(frozen=True, slots=True)
class Reply:
    """Text of a reply, or the failure that remains after all retries.

    ``cut``: whether the text ends because it reached the maximum number of tokens.
    """

    text: str | None
    failure: str = ""
    cost: Cost = field(default_factory=Cost)
    cut: bool = False


class Proposer(Protocol):
    """A language model; a failure of its endpoint is returned as a reply, not raised."""

    async def reply(
        self, messages: Messages, schema: JsonObject | None, seed: int
    ) -> Reply:
        """Reply to a chat, constrained by a JSON Schema if the endpoint supports that."""


@dataclass(frozen=True, slots=True)
class ProposalRequest:
    """One request to the proposer: its place in the search, its prompt, and its provenance."""

    round: int
    index: int
    messages: Messages
    origin: str
    parents: tuple[str, ...] = ()
    count: int = 0
    """Number of proposals in a list; 0 for a single proposal that is not in a list."""
    names: Collection[str] = ()
    """Candidates that a proposal of a list may name as its parent."""
    change: Callable[[str], str] | None = None
    """Function from a first reply that only has changes of a parent to the whole proposal; raises
    :class:`ValueError`. None if the reply is a proposal."""

    def draft(self, *problem: str) -> Draft:
        """A draft without a state, as the default for reading a reply.

        ``problem``: what is wrong with the reply as a whole, and how to fix it.
        """
        problems = (Problem("", *problem),) if problem else ()
        return Draft(self.origin, None, problems, self.parents)


@dataclass(frozen=True, slots=True)
class ProposalClient:
    """Requests proposals by their place in the search; recorded replies are not requested again.

    Without a ``proposer``, every reply has to be recorded. No request is sent once the cost has
    reached ``most_money``.
    """

    settings: Settings
    ledger: Ledger
    proposer: Proposer | None
    most_money: float | None

    async def request(self, request: ProposalRequest) -> list[Draft]:
        """The drafts in the reply to ``request``, after one attempt to repair invalid ones."""
        count = request.count
        change = request.change
        # A reply with changes is not JSON, so it is not constrained by a schema.
        reply = await self._reply(
            request, "first", request.messages, count, change is None
        )
        if reply.text is None:
            return [request.draft(reply.failure, "look at the endpoint")] * max(
                count, 1
            )
        text = reply.text
        drafts = list[Draft]()
        if change is not None:
            try:
                text = change(text)
            except ValueError as error:
                drafts = [request.draft(str(error), "change the object")]
        drafts = drafts or self._read_drafts(request, text, reply.cut, count)
        invalid = [index for index, draft in enumerate(drafts) if draft.state is None]
        if not invalid:
            return drafts
        problems = {
            f"{request.round}.{request.index + index}": list(
                map(str, drafts[index].problems)
            )
            for index in invalid
        }
        messages = repair_prompt(request.messages, reply.text, problems, count)
        length = len(invalid) if count else 0
        reply = await self._reply(request, "repair", messages, length, True)
        if reply.text is not None:
            repaired = self._read_drafts(request, reply.text, reply.cut, length)
            for index, draft in zip(invalid, repaired, strict=True):
                drafts[index] = draft if draft.state else drafts[index]
        return drafts

    def _read_drafts(
        self, request: ProposalRequest, text: str, cut: bool, count: int
    ) -> list[Draft]:
        """The drafts of a list of ``count`` proposals, or the only one.

        If the reply was cut off, that is the first problem of its invalid drafts.
        """
        settings = self.settings
        drafts = parse_reply(text, settings, request.draft(), count, request.names)
        if not cut:
            return drafts
        tokens = settings.reply_tokens * settings.proposals_per_reply
        fix = "write less, or raise --reply-tokens"
        problem = Problem("", f"the reply was cut off after {tokens} tokens", fix)
        return [
            d if d.state else replace(d, problems=(problem, *d.problems))
            for d in drafts
        ]

    def total_cost(self) -> Cost:
        """Cost of all replies of this search, including those before it was resumed."""
        replies = select_records(self.ledger, ReplyRecord)
        return sum((reply.cost for reply in replies), Cost())

    async def _reply(
        self,
        request: ProposalRequest,
        attempt: Attempt,
        messages: Messages,
        count: int,
        constrained: bool,
    ) -> ReplyRecord:
        """The recorded reply to a request for ``count`` proposals, or a new one."""
        settings = self.settings
        number = request.round
        index = request.index
        key = f"reply/{number}/{index}/{attempt}"
        recorded = self.ledger.find(ReplyRecord, key)
        if recorded is not None:
            return recorded
        if self.proposer is None:
            raise SearchError.of(
                "recording",
                "has no reply to this request",
                "resume the recorded search to its end",
            )
        start = time.monotonic()
        started_at = time.time()
        if self.most_money is not None and self.total_cost().money >= self.most_money:
            reply = Reply(
                None, f"the proposer's budget of {self.most_money} in money is spent"
            )
        else:
            schema = reply_schema(settings, count) if constrained else None
            seed = (settings.seed * 1_000_003 + number * 1009 + index) % 2**31
            reply = await self.proposer.reply(messages, schema, seed)
        # Keep one character more than is valid, so that the recorded reply is also too long.
        length = MAX_REPLY_CHARACTERS * settings.proposals_per_reply + 1
        text = reply.text
        if text is not None:
            text = _replace_surrogates(remove_thoughts(text)[:length])
        return self.ledger.put(
            ReplyRecord(
                round=number,
                index=index,
                attempt=attempt,
                request=hashlib.sha256(json.dumps(messages).encode()).hexdigest(),
                text=text,
                failure=_replace_surrogates(reply.failure),
                cost=reply.cost,
                cut=reply.cut,
                clock=Clock(at=started_at, seconds=round(time.monotonic() - start, 3)),
            )
        )


def _replace_surrogates(text: str) -> str:
    """``text`` with "?" in place of unpaired surrogates, which UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()
