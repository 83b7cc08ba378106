"""The proposer's endpoint: any OpenAI-compatible service, or a model served by vLLM."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Self

import httpx
from pydantic import JsonValue, SecretStr, ValidationError

from offline_search.components import JsonObject
from offline_search.ledger import Cost
from offline_search.prompt import Messages
from offline_search.proposer import Reply
from offline_search.replies import UNFINISHED
from vllm_autoprune.connection import Connection, api_address, make_client
from vllm_autoprune.errors import ConfigError, Problem, SearchError
from vllm_autoprune.http_client import (
    FAILURES,
    ChatAnswer,
    Failures,
    Retries,
    UnknownFormat,
    describe_error,
    describe_failure,
    is_unpaid,
    may_pass,
    read_models,
    read_object,
)
from vllm_autoprune.stream import one_line, read_message


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Address, model, sampling and retry settings of an endpoint."""

    url: str
    model: str
    connection: Connection = field(
        default_factory=lambda: Connection(api_key=SecretStr(""))
    )
    temperature: float = 1.0
    reply_tokens: int = 1024
    price: tuple[float, float] = (0.0, 0.0)
    """Price of a million prompt tokens, and of a million completion tokens."""
    retries: int = 4
    first_wait: float = 1.0
    """Seconds before the first retry; the wait doubles with every further retry."""
    timeout: float = 300.0
    max_in_flight: int = 8
    unsent: frozenset[str] = frozenset()
    """Fields that are not sent. For vLLM on a CPU, at least up to 0.32, it is the seed: with one, a
    prompt that is prefilled in chunks crashes the engine ("CPU Generator does not use offset")."""
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    """Further fields of every request."""


_CHECK_TOKENS = 16
"""Maximum tokens of the reply to the first check; some endpoints refuse a lower limit."""
_CHECK_TIMEOUT = 60.0
"""Seconds for that reply."""
_TIMED_ATTEMPTS = 2
"""Number of attempts if a request times out; it is low, because an attempt may take minutes."""
_REFUSED = (401, 402, 403, 404)
"""HTTP statuses for a wrong key, credit, model or address, after which no request can succeed."""

_DROPPABLE = ("max_tokens", "temperature", "seed", "response_format")
"""Fields that an endpoint may refuse. It may refuse the last without naming it, or fail on it."""


class EndpointProposer:
    """Proposer behind an endpoint; requests are repeated after a failure that may be temporary.

    If a request still fails, its failure becomes the reply; a failure that every request would
    meet ends the search by :class:`SearchError`. A field that the endpoint refuses is no longer
    sent once a request without it has succeeded.
    """

    def __init__(self, endpoint: EndpointSettings) -> None:
        self._endpoint = endpoint
        self._url = api_address(endpoint.url)
        self._http = make_client(
            httpx.AsyncClient,
            endpoint.url,
            endpoint.connection,
            timeout=endpoint.timeout,
        )
        self._failures = Failures(self._url)
        self._slots = asyncio.Semaphore(endpoint.max_in_flight)
        self.unsent = endpoint.unsent

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()
        self._failures.report()

    async def prepare(self) -> None:
        """Send one short chat; raises :class:`ConfigError` for a wrong key, model or address."""
        fields = self._fields(
            ({"role": "user", "content": "Say yes."},), None, 0, _CHECK_TOKENS
        )
        timeout = min(_CHECK_TIMEOUT, self._endpoint.timeout)
        try:
            _read_completion(await self._send(fields, 0, timeout))
            return
        except FAILURES as error:
            if isinstance(error, httpx.HTTPStatusError) and may_pass(error):
                return  # requests of the search have retries
            problem = await self._explain(error)
        raise ConfigError("proposer", [problem])

    async def _explain(self, error: Exception) -> Problem:
        """The reason why the endpoint cannot be used, and the flag to correct."""
        example = "an OpenAI-compatible endpoint, such as http://HOST:PORT/v1"
        url = self._url.removesuffix("/v1")
        problem = await asyncio.to_thread(describe_failure, url, error, example)
        where = "--proposer-url"
        fix = problem.fix
        status = None
        if isinstance(error, httpx.HTTPStatusError):
            status = error.response.status_code
        if status in (401, 403):
            where = "--proposer-key-env"
            fix = "name a variable that holds a valid key"
        elif status == 404:
            where += ", --proposer-model"  # either of them may be wrong
            with suppress(*FAILURES):  # an endpoint need not list its models
                response = await self._http.get(f"{self._url}/models")
                names = ", ".join([*read_models(response)][:8])
                fix = f"name a model that the endpoint has: {names}"
                where = "--proposer-model"
        return Problem(where, f"{problem.where} {problem.what}", fix)

    async def reply(
        self, messages: Messages, schema: JsonObject | None, seed: int
    ) -> Reply:
        """Reply to a chat; the schema is left out if the endpoint refuses one.

        Raises :class:`SearchError` if no further request can succeed.
        """
        endpoint = self._endpoint
        fields = self._fields(messages, schema, seed, endpoint.reply_tokens)
        async with self._slots:
            try:
                return _read_completion(
                    await self._send(fields, endpoint.retries), endpoint.price
                )
            except httpx.HTTPError as error:
                if _ends_search(error):
                    problem = await self._explain(error)
                    fix = f"{problem.fix}; then --resume, which goes on from here"
                    raise SearchError("proposer", [replace(problem, fix=fix)]) from None
                tried = ""
                if may_pass(error):
                    tried = f", after at most {endpoint.retries} retries"
                return Reply(None, describe_error(error) + tried)
            except FAILURES as error:
                return Reply(
                    None, f"the response is no chat completion: {one_line(error, 200)}"
                )

    def _fields(
        self, messages: Messages, schema: JsonObject | None, seed: int, tokens: int
    ) -> dict[str, object]:
        """The fields of a request, including those that an endpoint may refuse."""
        endpoint = self._endpoint
        fields: dict[str, object] = {
            "model": endpoint.model,
            "messages": list(messages),
        }
        fields |= {
            "max_tokens": tokens,
            "temperature": endpoint.temperature,
            "seed": seed,
        }
        if schema is not None:
            named = {"name": "proposal", "schema": schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": named}
        return {**fields, **endpoint.options}

    async def _send(
        self,
        fields: Mapping[str, object],
        retries: int,
        timeout: float | None = None,
    ) -> httpx.Response:
        """Send a request without the fields that the endpoint refuses, and return the response."""
        reasons = dict[str, str]()
        waits = Retries(retries + 1, self._endpoint.first_wait)
        attempt = 1
        while True:
            unsent = self.unsent | reasons.keys()
            body = {name: value for name, value in fields.items() if name not in unsent}
            if "max_tokens" in unsent:  # its name since OpenAI's o-series
                body["max_completion_tokens"] = fields["max_tokens"]
            try:
                response = await self._http.post(
                    f"{self._url}/chat/completions",
                    json=body,
                    timeout=timeout or self._endpoint.timeout,
                )
                response.raise_for_status()
            except httpx.HTTPError as error:
                if name := _find_refused_field(error, body):
                    reasons[name] = describe_error(error)
                    continue
                is_slow = isinstance(error, httpx.ReadTimeout)
                if not may_pass(error) or (is_slow and attempt >= _TIMED_ATTEMPTS):
                    raise
                wait = waits.wait(attempt, error, self._failures)
                if wait is None:
                    raise
                await asyncio.sleep(wait)
                attempt += 1
                continue
            # The success shows that the endpoint refused these fields.
            for name in sorted(reasons.keys() - self.unsent):
                instead = "it is no longer sent"
                if name == "max_tokens":
                    instead = "max_completion_tokens is sent instead"
                line = f"the proposer refuses {name} ({reasons[name]}): {instead}"
                print(line, file=sys.stderr, flush=True)
            self.unsent = unsent
            return response


def _find_refused_field(error: Exception, body: Mapping[str, object]) -> str | None:
    """The field of ``body`` that the endpoint may have refused; None if the error is another.

    An endpoint names the field that it refuses, except for a schema.
    """
    if not isinstance(error, httpx.HTTPStatusError):
        return None
    response = error.response
    if response.status_code not in (400, 422, 500):
        return None
    words = re.findall(r"\w+", response.text if response.status_code != 500 else "")
    named = [name for name in _DROPPABLE if name in body and name in words]
    if "response_format" in body:
        named.append("response_format")
    return next(iter(named), None)


def _ends_search(error: Exception) -> bool:
    """Whether every further request would fail with the same error."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _REFUSED or is_unpaid(error.response)
    return isinstance(error, httpx.TransportError)


def _read_completion(
    response: httpx.Response, price: tuple[float, float] = (0.0, 0.0)
) -> Reply:
    """The reply in a chat completion; raises one of :data:`FAILURES` for anything else."""
    body = read_object(response)
    try:
        choice = ChatAnswer.model_validate(body).choices[0]
    except ValidationError:
        raise UnknownFormat(one_line(json.dumps(body), 200)) from None
    answer, thoughts = read_message(choice.message)
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    texts = [str(usage.get(name)) for name in ("prompt_tokens", "completion_tokens")]
    counts = [int(count) if count.isdecimal() else 0 for count in texts]
    cut = choice.finish_reason == "length"
    return Reply(
        answer or (UNFINISHED if thoughts else ""), "", Cost.at(price, *counts), cut
    )
