"""Proposals by a language model: requests, their replies in the ledger, and the endpoint itself."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import httpx
import openai
from openai import AsyncOpenAI
from pydantic import SecretStr

from offline_search.candidates import (
    MAX_REPLY_CHARACTERS,
    Draft,
    list_schema,
    parse_list,
    parse_proposal,
    proposal_schema,
)
from offline_search.components import JsonObject, SelectionProgram
from offline_search.ledger import Attempt, Clock, Cost, Ledger, ProgramRecord, ReplyRecord
from offline_search.programs import run_program
from offline_search.prompt import Messages, repair_list_prompt, repair_prompt
from offline_search.settings import Settings
from vllm_autoprune.connection import Connection, api_address, find_address, make_client
from vllm_autoprune.errors import ConfigError, Problem, SearchError
from vllm_autoprune.http_client import describe_failure


@dataclass(frozen=True, slots=True)
class Reply:
    """Text of a reply, or the failure that remains after all retries."""

    text: str | None
    failure: str = ""
    cost: Cost = field(default_factory=Cost)


class Proposer(Protocol):
    """A language model; failures of its endpoint are replies, not exceptions."""

    async def reply(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
        """Reply to a chat, constrained by a JSON Schema if the endpoint supports that."""


@dataclass(frozen=True, slots=True)
class SpendingLimits:
    """Maximum cost of a search's proposer; None is unlimited."""

    tokens: int | None = None
    money: float | None = None

    def exceeded(self, cost: Cost) -> str:
        """The limit that is reached, as a message, or an empty string."""
        if self.tokens is not None and cost.tokens >= self.tokens:
            return f"the proposer's budget of {self.tokens} tokens is spent"
        if self.money is not None and cost.money >= self.money:
            return f"the proposer's budget of {self.money} in money is spent"
        return ""


@dataclass(frozen=True, slots=True)
class ProposalRequest:
    """One request to the proposer: its place in the search, its prompt, and its provenance."""

    round: int
    index: int
    messages: Messages
    origin: str
    parents: tuple[str, ...] = ()

    def draft(self, *problem: str) -> Draft:
        """A draft without a state, for which a reply is read; or with a problem: what, and the fix.

        The problem is of the reply as a whole.
        """
        problems = (Problem("", *problem),) if problem else ()
        return Draft(self.origin, None, problems, self.parents)


class ProposalClient:
    """Requests proposals by their place in the search; recorded replies are not requested again."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        proposer: Proposer | None,
        limits: SpendingLimits,
    ) -> None:
        """Without a ``proposer`` every reply has to be recorded."""
        self._settings = settings
        self._ledger = ledger
        self._proposer = proposer
        self._limits = limits

    async def request_proposal(self, request: ProposalRequest) -> Draft:
        """The draft in a reply, after one attempt to repair an invalid reply."""
        schema = proposal_schema(self._settings)
        reply = await self._reply(request, "first", request.messages, schema)
        if reply.text is None:
            return _failed_draft(request, reply)
        draft = parse_proposal(reply.text, self._settings, request.draft())
        if draft.state is not None:
            return draft
        messages = repair_prompt(request.messages, reply.text, list(map(str, draft.problems)))
        reply = await self._reply(request, "repair", messages, schema)
        if reply.text is None:
            return draft
        return parse_proposal(reply.text, self._settings, request.draft())

    async def request_list(
        self, request: ProposalRequest, count: int, names: Collection[str]
    ) -> list[Draft]:
        """The ``count`` drafts in a reply, after one attempt to repair those that are invalid.

        A proposal may have one of ``names`` as its parent.
        """
        settings, messages = self._settings, request.messages
        reply = await self._reply(request, "first", messages, list_schema(settings, count))
        if reply.text is None:
            return [_failed_draft(request, reply)] * count
        drafts = parse_list(reply.text, settings, count, request.draft(), names)
        invalid = [index for index, draft in enumerate(drafts) if draft.state is None]
        if not invalid:
            return drafts
        problems = {index + 1: list(map(str, drafts[index].problems)) for index in invalid}
        messages = repair_list_prompt(messages, reply.text, problems, count)
        schema = list_schema(settings, len(invalid))
        reply = await self._reply(request, "repair", messages, schema)
        if reply.text is not None:
            repaired = parse_list(reply.text, settings, len(invalid), request.draft(), names)
            for index, draft in zip(invalid, repaired, strict=True):
                drafts[index] = drafts[index] if draft.state is None else draft
        return drafts

    async def request_program(
        self, request: ProposalRequest, extract_code: Callable[[str], str]
    ) -> Draft:
        """The draft of a program in a reply: the state that it returns, or itself as a selection.

        ``extract_code`` raises :class:`ValueError` for a reply without a program. Failed programs
        are not repaired: later prompts show their errors.
        """
        reply = await self._reply(request, "first", request.messages, None)
        if reply.text is None:
            return _failed_draft(request, reply)
        try:
            code = extract_code(reply.text)
        except ValueError as error:
            return request.draft(str(error), "change the program")
        if self._settings.writes_code:
            return replace(request.draft(), program=code, selection=SelectionProgram(code))
        record = ProgramRecord(
            round=request.round, index=request.index, code=code[:MAX_REPLY_CHARACTERS]
        )
        program = self._ledger.find(ProgramRecord, record.key)
        if program is None:
            output, failure = await run_program(code, self._settings.source_budget)
            result = {"output": output, "failure": failure}
            program = self._ledger.put(record.model_copy(update=result))
        if program.failure:
            fix = "write a program that defines policy(budget)"
            draft = request.draft(program.failure, fix)
        else:
            draft = parse_proposal(program.output, self._settings, request.draft())
        return replace(draft, program=program.code)

    def total_cost(self) -> Cost:
        """Cost of all replies of this search, including those before it was resumed."""
        replies = (record for record in self._ledger if isinstance(record, ReplyRecord))
        return sum((reply.cost for reply in replies), Cost())

    async def _reply(
        self,
        request: ProposalRequest,
        attempt: Attempt,
        messages: Messages,
        schema: JsonObject | None,
    ) -> ReplyRecord:
        """The recorded reply to a request, or a new one."""
        number, index = request.round, request.index
        known = self._ledger.find(ReplyRecord, f"reply/{number}/{index}/{attempt}")
        if known is not None:
            return known
        if self._proposer is None:
            fix = "resume the recorded search to its end"
            raise SearchError(f"the recording has no reply to this request -> {fix}")
        start, started_at = time.monotonic(), time.time()
        if exceeded := self._limits.exceeded(self.total_cost()):
            reply = Reply(None, exceeded)
        else:
            seed = (self._settings.seed * 1_000_003 + number * 1009 + index) % 2**31
            reply = await self._proposer.reply(messages, schema, seed)
        # One character more than is valid, so that a recorded reply is too long as well.
        length = MAX_REPLY_CHARACTERS * self._settings.proposals_per_reply + 1
        text, failure = (
            # "?" for halves of surrogate pairs, which UTF-8 cannot hold.
            None if value is None else value.encode(errors="replace").decode()
            for value in (reply.text and reply.text[:length], reply.failure)
        )
        return self._ledger.put(
            ReplyRecord(
                round=number,
                index=index,
                attempt=attempt,
                request=hashlib.sha256(json.dumps(messages).encode()).hexdigest(),
                text=text,
                failure=failure or "",
                cost=reply.cost,
                clock=Clock(at=started_at, seconds=round(time.monotonic() - start, 3)),
            )
        )


def _failed_draft(request: ProposalRequest, reply: ReplyRecord) -> Draft:
    return request.draft(reply.failure, "look at the endpoint")


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Address, model, sampling and retry settings of an endpoint."""

    url: str
    model: str
    connection: Connection = field(default_factory=lambda: Connection(api_key=SecretStr("")))
    temperature: float = 1.0
    reply_tokens: int = 1024
    price: tuple[float, float] = (0.0, 0.0)
    """Money for a million prompt and a million completion tokens."""
    retries: int = 4
    timeout: float = 300.0
    max_in_flight: int = 8
    seeded: bool = True
    """False for vLLM on a CPU, at least up to 0.32: a request with a seed whose prompt is prefilled
    in chunks crashes its engine ("CPU Generator does not use offset")."""


_REFUSALS = (openai.BadRequestError, openai.UnprocessableEntityError)
"""Refused requests; the JSON Schema may be the reason."""

_PERMANENT_ERRORS = (
    openai.AuthenticationError,
    openai.PermissionDeniedError,
    openai.NotFoundError,
    *_REFUSALS,
)
"""Errors that a retry cannot change."""


class EndpointProposer:
    """Proposer behind any OpenAI-compatible endpoint: a service, or a model served by vLLM.

    OpenAI's client retries what may pass, after ``Retry-After`` of two minutes at most or growing
    waits with jitter; a failure that remains is a reply. JSON Schemas are no longer sent once they
    are refused.
    """

    def __init__(self, endpoint: EndpointSettings) -> None:
        self._endpoint, connection = endpoint, endpoint.connection
        self._url = api_address(endpoint.url)
        # By its type, because openai 3 takes a client of httpx only for its successor's sake.
        http: Any = make_client(httpx.AsyncClient, endpoint.url, connection)
        self._client = AsyncOpenAI(
            base_url=self._url,
            api_key="none",
            max_retries=endpoint.retries,
            timeout=endpoint.timeout,
            default_headers={k.title(): v for k, v in connection.headers(endpoint.url).items()},
            http_client=http,
        )
        self._slots = asyncio.Semaphore(endpoint.max_in_flight)
        self._supports_schema = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    async def prepare(self) -> None:
        """Send one short chat; raises :class:`ConfigError` for a wrong key, model or address."""
        where, fix = "--proposer-url", "look at what the endpoint says"
        try:
            await self._client.with_options(max_retries=0).chat.completions.create(
                model=self._endpoint.model,
                messages=[{"role": "user", "content": "Say yes."}],
                max_tokens=1,
            )
            return
        except openai.APIStatusError as error:
            status = error.status_code
            if status == 429 or status >= 500:
                return  # temporarily overloaded; requests of the search are retried
            if status in (401, 403):
                where, fix = "--proposer-key-env", "name a variable that holds a valid key"
            elif status == 404:
                where, fix = "--proposer-model", "name a model that the endpoint has"
                try:
                    names = [model.id async for model in self._client.models.list()]
                    fix += f": {', '.join(names[:8])}"
                except (openai.OpenAIError, AttributeError, TypeError):
                    if other := find_address(self._url):
                        where, fix = "--proposer-url", f"give {other}, which answers"
            what = f"refused with status {status} ({_error_text(error)})"
        except openai.OpenAIError as error:
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            problem = describe_failure(self._url, cause)
            what, fix = f"{problem.where} {problem.what}", problem.fix
        raise ConfigError("proposer", [Problem(where, what, fix)])

    async def reply(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
        """Reply to a chat; without the schema where the endpoint refuses one."""
        async with self._slots:
            used = schema if self._supports_schema else None
            try:
                try:
                    return await self._send(messages, used, seed)
                except _REFUSALS:
                    if used is None:
                        raise
                reply = await self._send(messages, None, seed)
                # Only now is it known that the schema was what the endpoint refused.
                self._supports_schema = False
                return reply
            except openai.OpenAIError as error:
                failure = f"{type(error).__name__}: {_error_text(error)}"
                permanent = isinstance(error, _PERMANENT_ERRORS)
                retries = "" if permanent else f", after at most {self._endpoint.retries} retries"
                return Reply(None, failure + retries)
            except (ValueError, TypeError, AttributeError, IndexError, RecursionError) as error:
                # The client does not validate responses, so any of these can come from one.
                return Reply(None, f"the response is no chat completion: {_shorten(error)}")

    async def _send(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
        endpoint = self._endpoint
        extra: dict[str, Any] = {"seed": seed} if endpoint.seeded else {}
        if schema is not None:
            named = {"name": "proposal", "schema": schema}
            extra["response_format"] = {"type": "json_schema", "json_schema": named}
        create: Callable[..., Any] = self._client.chat.completions.create
        completion = await create(
            model=endpoint.model,
            messages=list(messages),
            temperature=endpoint.temperature,
            max_tokens=endpoint.reply_tokens,
            **extra,
        )
        usage = completion.usage
        counts = (int(usage.prompt_tokens), int(usage.completion_tokens)) if usage else (0, 0)
        cost = Cost.at(endpoint.price, *counts)
        message = completion.choices[0].message
        text = message.content or message.refusal
        return Reply(text if isinstance(text, str) else "", "", cost)


def _error_text(error: openai.OpenAIError) -> str:
    if isinstance(error, openai.APIStatusError) and isinstance(error.body, dict):
        return _shorten(error.body.get("message") or json.dumps(error.body))
    return _shorten(error)


def _shorten(text: object) -> str:
    return " ".join(str(text).split())[:200]
