"""Proposals by a language model: requests, their replies in the ledger, and the endpoint itself."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import httpx
import openai
from openai import AsyncOpenAI
from pydantic import JsonValue, SecretStr

from offline_search.candidates import (
    MAX_REPLY_CHARACTERS,
    UNFINISHED,
    Draft,
    list_schema,
    parse_list,
    parse_proposal,
    proposal_schema,
    remove_thoughts,
)
from offline_search.components import JsonObject, SelectionProgram
from offline_search.ledger import Attempt, Clock, Cost, Ledger, ProgramRecord, ReplyRecord
from offline_search.programs import run_program
from offline_search.prompt import Messages, repair_list_prompt, repair_prompt
from offline_search.settings import Settings
from vllm_autoprune.connection import Connection, api_address, find_address, make_client
from vllm_autoprune.errors import ConfigError, Problem, SearchError
from vllm_autoprune.http_client import describe_failure, describe_rejection
from vllm_autoprune.stream import read_error, read_message


@dataclass(frozen=True, slots=True)
class Reply:
    """Text of a reply, or the failure that remains after all retries.

    ``cut``: it ends where it reached the maximum of tokens.
    """

    text: str | None
    failure: str = ""
    cost: Cost = field(default_factory=Cost)
    cut: bool = False


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
        (draft,) = self._read_drafts(request, reply)
        if draft.state is not None:
            return draft
        messages = repair_prompt(request.messages, reply.text, list(map(str, draft.problems)))
        reply = await self._reply(request, "repair", messages, schema)
        return draft if reply.text is None else self._read_drafts(request, reply)[0]

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
        drafts = self._read_drafts(request, reply, count, names)
        invalid = [index for index, draft in enumerate(drafts) if draft.state is None]
        if not invalid:
            return drafts
        problems = {index + 1: list(map(str, drafts[index].problems)) for index in invalid}
        messages = repair_list_prompt(messages, reply.text, problems, count)
        schema = list_schema(settings, len(invalid))
        reply = await self._reply(request, "repair", messages, schema)
        if reply.text is not None:
            repaired = self._read_drafts(request, reply, len(invalid), names)
            for index, draft in zip(invalid, repaired, strict=True):
                drafts[index] = drafts[index] if draft.state is None else draft
        return drafts

    def _read_drafts(
        self,
        request: ProposalRequest,
        reply: ReplyRecord,
        count: int = 0,
        names: Collection[str] = (),
    ) -> list[Draft]:
        """The drafts of a list of ``count`` proposals, or the only one."""
        settings, text, default = self._settings, reply.text or "", request.draft()
        if not count:
            return [self._explain(parse_proposal(text, settings, default), reply)]
        drafts = parse_list(text, settings, count, default, names)
        return [self._explain(draft, reply) for draft in drafts]

    def _explain(self, draft: Draft, reply: ReplyRecord) -> Draft:
        """The draft, with the likely reason first where it is invalid and its reply was cut off."""
        if draft.state or not reply.cut:
            return draft
        tokens = self._settings.reply_tokens * self._settings.proposals_per_reply
        fix = "write less, or raise --reply-tokens"
        cut = Problem("", f"the reply was cut off after {tokens} tokens", fix)
        return replace(draft, problems=(cut, *draft.problems))

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
            return self._explain(request.draft(str(error), "change the program"), reply)
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
            for value in (reply.text and remove_thoughts(reply.text)[:length], reply.failure)
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
                cut=reply.cut,
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
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    """More fields of every request."""


_TEMPORARY = (408, 409, 425, 429)
"""Refusals that pass, beside all errors of the server."""
_LONGEST_WAIT = 120.0
"""Seconds of a ``Retry-After`` that OpenAI's client waits; it takes what is no number for none."""
_CHECK_TOKENS = 16
"""Length of the reply to the first check: some endpoints refuse less."""

_FORMAT = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""What reading a response raises that is no chat completion."""


class EndpointProposer:
    """Proposer behind any OpenAI-compatible endpoint: a service, or a model served by vLLM.

    OpenAI's client retries what may pass, after ``Retry-After`` or growing waits with jitter; a
    failure that remains is a reply. Fields of a request that the endpoint refuses are no longer
    sent once a request without them has succeeded; ``report`` is told which.
    """

    def __init__(
        self, endpoint: EndpointSettings, report: Callable[[str], None] = lambda line: None
    ) -> None:
        self._endpoint, self._report = endpoint, report
        self._url, connection = api_address(endpoint.url), endpoint.connection
        # Untyped: openai 3 declares a client of httpx2, and takes one of httpx too.
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
        self._refused = frozenset[str]()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    async def prepare(self) -> None:
        """Send one short chat; raises :class:`ConfigError` for a wrong key, model or address."""
        where, fix = "--proposer-url", "look at what the endpoint says"
        fields = self._fields(({"role": "user", "content": "Say yes."},), None, 0, _CHECK_TOKENS)
        try:
            _read_completion(await self._send(fields, retries=0))
            return
        except openai.APIStatusError as error:
            status, what = error.status_code, f"{self._url} answers with {_error_text(error)}"
            if error.code != "insufficient_quota" and _may_pass(error):
                return  # requests of the search are retried
            if status in (401, 403):
                where, fix = "--proposer-key-env", "name a variable that holds a valid key"
            elif status < 400:
                fix = f"give the address of {error.response.headers.get('location')}"
            elif status == 404:
                where, fix = "--proposer-model", "name a model that the endpoint has"
                try:
                    names = [str(model.id) async for model in self._client.models.list()]
                    fix += f": {', '.join(names[:8]) or 'it lists none'}"
                except (openai.OpenAIError, *_FORMAT):
                    if other := find_address(self._url):
                        where, fix = "--proposer-url", f"give {other}, which answers"
        except openai.OpenAIError as error:
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            problem = describe_failure(self._url.removesuffix("/v1"), cause)
            what, fix = f"{problem.where} {problem.what}", problem.fix
        except _FORMAT as error:
            what, other = f"{self._url} sends no chat completion: {error}", find_address(self._url)
            other = other or "an OpenAI-compatible address, such as http://HOST:PORT/v1"
            fix = f"look at what it says, or give {other}"
        raise ConfigError("proposer", [Problem(where, what, fix)])

    async def reply(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
        """Reply to a chat; without the schema where the endpoint refuses one."""
        fields = self._fields(messages, schema, seed, self._endpoint.reply_tokens)
        async with self._slots:
            try:
                text = await self._send(fields, self._endpoint.retries)
            except openai.OpenAIError as error:
                failure = _error_text(error)
                if not isinstance(error, openai.APIStatusError) or _may_pass(error):
                    failure += f", after at most {self._endpoint.retries} retries"
                return Reply(None, failure)
        try:
            return _read_completion(text, self._endpoint.price)
        except _FORMAT as error:
            return Reply(None, f"the response is no chat completion: {_shorten(error)}")

    def _fields(
        self, messages: Messages, schema: JsonObject | None, seed: int, tokens: int
    ) -> dict[str, object]:
        """The fields of a request that an endpoint may refuse, and those that it may not."""
        endpoint = self._endpoint
        fields: dict[str, object] = {"model": endpoint.model, "messages": list(messages)}
        fields |= {"max_tokens": tokens, "temperature": endpoint.temperature}
        if endpoint.seeded:
            fields["seed"] = seed
        if schema is not None:
            named = {"name": "proposal", "schema": schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": named}
        return {**fields, **endpoint.options}

    async def _send(self, fields: Mapping[str, object], retries: int) -> str:
        """The text of the response to a request, without the fields that the endpoint refuses."""
        refused, reasons = self._refused, dict[str, str]()
        client = self._client.with_options(max_retries=retries)
        while True:
            body = {name: value for name, value in fields.items() if name not in refused}
            if "max_tokens" in refused:  # its name since OpenAI's o-series
                body["max_completion_tokens"] = fields["max_tokens"]
            try:
                text = await client.post("/chat/completions", cast_to=str, body=body)
            except openai.APIStatusError as error:
                droppable = [name for name in _DROPPABLE if name in body]
                name = _find_refused_field(error, droppable)
                if name is None:
                    raise
                reasons[name] = _error_text(error)
                refused |= {name}
                continue
            # Only now is it known that these fields were what the endpoint refused.
            for name in sorted(reasons.keys() - self._refused):
                instead = "max_completion_tokens is sent instead" if name == "max_tokens" else (
                    "it is no longer sent")  # fmt: skip
                self._report(f"the proposer refuses {name} ({reasons[name]}): {instead}")
            self._refused |= refused
            return text


_DROPPABLE = ("max_tokens", "temperature", "seed", "response_format")
"""Fields that an endpoint may refuse; the last by any words, or by failing on the schema."""


def _find_refused_field(error: openai.APIStatusError, names: Sequence[str]) -> str | None:
    """Which of a request's fields an error refuses, if any."""
    if error.status_code not in (400, 422, 500):
        return None
    if error.status_code != 500:
        named = [n for n in names if re.search(rf"\b{n}\b", error.response.text)]
        if error.param in named or named:
            return error.param if error.param in named else named[0]
    return "response_format" if "response_format" in names else None


def _may_pass(error: openai.APIStatusError) -> bool:
    return error.status_code in _TEMPORARY or error.status_code >= 500


def _read_completion(text: str, price: tuple[float, float] = (0.0, 0.0)) -> Reply:
    """The reply in a chat completion; raises one of :data:`_FORMAT` for anything else."""
    try:
        body = json.loads(text)
    except json.JSONDecodeError:
        raise ValueError(f"{_shorten(text)[:120]!r}") from None
    if not isinstance(body, dict) or not body.get("choices"):
        raise ValueError(_shorten(read_error(body) or json.dumps(body)))
    choice, usage = body["choices"][0], body.get("usage")
    answer, thoughts = read_message(choice["message"])
    if not answer and (calls := choice["message"].get("tool_calls")):
        answer = str(calls[0]["function"]["arguments"])
    if not answer and thoughts:
        answer = UNFINISHED
    counts = [0, 0]
    if isinstance(usage, dict):
        texts = [str(usage.get(name)) for name in ("prompt_tokens", "completion_tokens")]
        counts = [int(count) if count.isdecimal() else 0 for count in texts]
    cut = choice.get("finish_reason") == "length"
    return Reply(answer, cost=Cost.at(price, *counts), cut=cut)


def _error_text(error: openai.OpenAIError) -> str:
    """What an endpoint says, or why it says nothing, in one line."""
    if not isinstance(error, openai.APIStatusError):
        cause = error.__cause__ or error
        return f"{type(cause).__name__}: {_shorten(cause)}".removesuffix(": ")
    response: Any = error.response
    text = describe_rejection(response)
    with suppress(ValueError):
        seconds = float(response.headers.get("retry-after", ""))
        if seconds > _LONGEST_WAIT:
            text += f"; it asks to wait {seconds:.0f} s, {_LONGEST_WAIT:.0f} s are the most"
    return text


def _shorten(text: object) -> str:
    return " ".join(str(text).split())[:200]
