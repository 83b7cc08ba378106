"""One draft from a proposer: asked, read, repaired once, and entered in the ledger.

Knows nothing about endpoints, nor about strategies.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from offline_search.ledger import Ledger
from offline_search.menu import Menu
from offline_search.programs.run import run_program
from offline_search.prompt import Messages, repair
from offline_search.proposal import (
    LONGEST_REPLY,
    Draft,
    JsonObject,
    proposal_schema,
    read_proposal,
)
from offline_search.proposers.protocol import Proposer, Reply
from offline_search.records import Clock, Cost, Ran, Replied
from offline_search.settings import Settings
from vllm_autoprune.errors import Problem


@dataclass(frozen=True, slots=True)
class Limits:
    """What a search may spend on its proposer; None is without bound."""

    tokens: int | None = None
    money: float | None = None

    def spent(self, cost: Cost) -> str:
        """Why nothing more may be asked, or nothing."""
        if self.tokens is not None and cost.tokens >= self.tokens:
            return f"the proposer's budget of {self.tokens} tokens is spent"
        if self.money is not None and cost.money >= self.money:
            return f"the proposer's budget of {self.money} in money is spent"
        return ""


class Asking:
    """Drafts by place in the search, so that a resumed search finds those it has."""

    def __init__(
        self, settings: Settings, ledger: Ledger, proposer: Proposer, limits: Limits
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._proposer = proposer
        self._limits = limits

    async def draft(
        self,
        place: tuple[int, int],
        messages: Messages,
        origin: str,
        parents: tuple[str, ...],
        code_in: Callable[[str], str] | None = None,
        menu: Menu | None = None,
    ) -> Draft:
        """The draft of one conversation, repaired once where its reply is not valid.

        With a menu the reply is held to its atoms, where the endpoint can hold it to anything.
        With ``code_in`` a program is asked for; it finds the code in the reply. The draft is what
        the program returns, and nothing is repaired: its error is shown to whoever writes the next.
        """
        if code_in is not None:
            return await self._programmed(place, messages, origin, parents, code_in)
        schema = proposal_schema(self._settings.source_budget)
        if menu is not None:
            schema = menu.narrowed(schema)
        first = await self._reply(place, "first", messages, schema)
        draft = self._read(first, origin, parents)
        if draft.state is not None or first.text is None:
            return draft
        told = [str(problem) for problem in draft.problems]
        second = await self._reply(place, "repair", repair(messages, first.text, told), schema)
        fixed = self._read(second, origin, parents)
        return fixed if second.text is not None else draft

    async def _programmed(
        self,
        place: tuple[int, int],
        messages: Messages,
        origin: str,
        parents: tuple[str, ...],
        code_in: Callable[[str], str],
    ) -> Draft:
        replied = await self._reply(place, "first", messages, None)
        if replied.text is None:
            return self._read(replied, origin, parents)
        number, index = place
        ran = self._ledger.find(Ran, f"program/{number}/{index}")
        if ran is None:
            code = code_in(replied.text)
            output = await run_program(code, self._settings.source_budget)
            ran = self._ledger.put(
                Ran(
                    round=number,
                    index=index,
                    code=code[:LONGEST_REPLY],
                    output=output.text,
                    failure=output.failure,
                )
            )
        if ran.failure:
            fix = "write a program that defines policy(budget)"
            problem = Problem("", ran.failure, fix, "reply.program")
            return Draft(origin, None, (problem,), parents, ran.code)
        draft = read_proposal(ran.output, self._settings, origin, parents)
        return replace(draft, program=ran.code)

    def spent(self) -> Cost:
        """What all replies of this search have cost, those before a resume among them."""
        total = Cost()
        for record in self._ledger:
            if isinstance(record, Replied):
                total += record.cost
        return total

    def _read(self, replied: Replied, origin: str, parents: tuple[str, ...]) -> Draft:
        if replied.text is None:
            problem = Problem("", replied.failure, "look at the endpoint", "reply.failure")
            return Draft(origin, None, (problem,), parents)
        return read_proposal(replied.text, self._settings, origin, parents)

    async def _reply(
        self,
        place: tuple[int, int],
        attempt: Literal["first", "repair"],
        messages: Messages,
        schema: JsonObject | None,
    ) -> Replied:
        number, index = place
        known = self._ledger.find(Replied, f"reply/{number}/{index}/{attempt}")
        if known is not None:
            return known
        began, asked = time.monotonic(), time.time()
        reply = await self._ask(place, messages, schema)
        return self._ledger.put(
            Replied(
                round=number,
                index=index,
                attempt=attempt,
                request=hashlib.sha256(json.dumps(messages).encode()).hexdigest(),
                # Enough to see that it was too long, and to read it so again.
                text=None if reply.text is None else reply.text[: LONGEST_REPLY + 1],
                failure=reply.failure,
                cost=reply.cost,
                clock=Clock(at=asked, seconds=round(time.monotonic() - began, 3)),
            )
        )

    async def _ask(
        self, place: tuple[int, int], messages: Messages, schema: JsonObject | None
    ) -> Reply:
        if why := self._limits.spent(self.spent()):
            return Reply(None, why)
        number, index = place
        seed = (self._settings.seed * 1_000_003 + number * 1009 + index) % 2**31
        return await self._proposer.reply(messages, schema, seed)
