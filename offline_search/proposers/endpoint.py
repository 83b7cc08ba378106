"""Proposer behind any OpenAI-compatible endpoint: Qwen, DeepSeek, or a model served by vLLM.

Retries are bounded in number and duration; a failure that remains is a reply with its reason, not
an exception.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import openai
from openai import AsyncOpenAI

from offline_search.candidates.components import JsonObject
from offline_search.ledger.records import Cost
from offline_search.proposers.prompt import Messages
from offline_search.proposers.proposal_client import Reply
from vllm_autoprune.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class Price:
    """Money for a million prompt and completion tokens."""

    prompt: float = 0.0
    completion: float = 0.0

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Cost of a number of tokens."""
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / 1e6


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Address, model, sampling and retry settings of an endpoint."""

    url: str
    model: str
    key: str = "none"
    temperature: float = 1.0
    reply_tokens: int = 1024
    price: Price = field(default_factory=Price)
    retries: int = 4
    first_wait: float = 1.0
    longest_wait: float = 60.0
    timeout: float = 300.0
    max_in_flight: int = 8
    seeded: bool = True
    """False for vLLM on a CPU, at least up to 0.32: a request with a seed whose prompt is prefilled
    in chunks crashes its engine ("CPU Generator does not use offset")."""


_PERMANENT_ERRORS = (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError)
"""Errors that a retry cannot change."""

_REFUSALS = (openai.BadRequestError, openai.UnprocessableEntityError)
"""Refused requests; the JSON Schema may be the reason."""


class EndpointProposer:
    """Proposer at one endpoint; stops sending JSON Schemas once the endpoint refuses them."""

    def __init__(self, endpoint: EndpointSettings) -> None:
        self._endpoint = endpoint
        self._client = AsyncOpenAI(
            base_url=endpoint.url, api_key=endpoint.key, max_retries=0, timeout=endpoint.timeout
        )
        self._slots = asyncio.Semaphore(endpoint.max_in_flight)
        self._supports_schema = True
        # For the jitter of waits only, so it needs no seed.
        self._rng = Random()

    async def prepare(self) -> None:
        """Send one short chat; raises :class:`ConfigError` for a wrong key, model or address."""
        where = "--proposer-url"
        try:
            await self._client.chat.completions.create(
                model=self._endpoint.model,
                messages=[{"role": "user", "content": "Say yes."}],
                max_tokens=1,
            )
        except openai.APIStatusError as error:
            if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
                where, fix = "--proposer-key-env", "name a variable that holds a valid key"
            elif isinstance(error, openai.NotFoundError):
                where, fix = "--proposer-model", await self._list_models()
            elif error.status_code == 429 or error.status_code >= 500:
                return  # temporarily overloaded; requests of the search are retried
            else:
                fix = "look at what the endpoint says"
            what = f"refused with status {error.status_code} ({_error_text(error)})"
            raise ConfigError("proposer", [Problem(where, what, fix)]) from None
        except openai.OpenAIError as error:
            what = f"{self._endpoint.url} does not answer ({_error_text(error)})"
            raise ConfigError(
                "proposer", [Problem(where, what, "start the endpoint, or correct its address")]
            ) from None

    async def reply(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
        """Reply to a chat, with retries."""
        async with self._slots:
            used = schema if self._supports_schema else None
            wait, retries = self._endpoint.first_wait, 0
            while True:
                try:
                    reply = await self._send(messages, used, seed)
                except _PERMANENT_ERRORS as error:
                    return Reply(None, f"{type(error).__name__}: {_error_text(error)}")
                except _REFUSALS as error:
                    if used is None:
                        return Reply(None, f"{type(error).__name__}: {_error_text(error)}")
                    used = None
                except openai.OpenAIError as error:
                    failure = f"{type(error).__name__}: {_error_text(error)}"
                    if retries == self._endpoint.retries:
                        return Reply(None, f"{failure}, after {retries} retries")
                    await asyncio.sleep(self._retry_delay(error, wait))
                    wait = min(2 * wait, self._endpoint.longest_wait)
                    retries += 1
                except (ValueError, TypeError, AttributeError, IndexError, RecursionError) as error:
                    # The client does not validate responses, so any of these can come from one.
                    return Reply(None, f"the response is no chat completion: {_shorten(error)}")
                else:
                    # Only now is it known that the schema was what the endpoint refused.
                    self._supports_schema &= used is schema
                    return reply

    async def close(self) -> None:
        """Close the client's connections."""
        await self._client.close()

    async def _send(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
        endpoint = self._endpoint
        extra: dict[str, Any] = {"seed": seed} if endpoint.seeded else {}
        if schema is not None:
            named = {"name": "proposal", "schema": schema}
            extra["response_format"] = {"type": "json_schema", "json_schema": named}
        create: Callable[..., Awaitable[Any]] = self._client.chat.completions.create
        completion = await create(
            model=endpoint.model,
            messages=list(messages),
            temperature=endpoint.temperature,
            max_tokens=endpoint.reply_tokens,
            **extra,
        )
        usage = completion.usage
        prompt_tokens = int(usage.prompt_tokens) if usage else 0
        completion_tokens = int(usage.completion_tokens) if usage else 0
        cost = Cost(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            money=round(endpoint.price.cost(prompt_tokens, completion_tokens), 9),
        )
        message = completion.choices[0].message
        text = message.content or message.refusal
        return Reply(text if isinstance(text, str) else "", "", cost)

    def _retry_delay(self, error: openai.OpenAIError, wait: float) -> float:
        """Seconds before the next attempt: ``Retry-After`` within bounds, or a wait with jitter.

        Jitter spreads out retries of requests that were refused at the same time.
        """
        retry_after = ""
        if isinstance(error, openai.APIStatusError):
            retry_after = error.response.headers.get("retry-after", "")
        try:
            wait = float(retry_after)
        except ValueError:
            wait *= 1 + self._rng.random()
        return min(max(wait, 0.0), self._endpoint.longest_wait)

    async def _list_models(self) -> str:
        try:
            models = [model.id async for model in self._client.models.list()]
        except openai.OpenAIError:
            return "name a model that the endpoint has"
        return f"name a model that the endpoint has: {', '.join(models[:8])}"


def _error_text(error: openai.OpenAIError) -> str:
    if isinstance(error, openai.APIStatusError) and isinstance(error.body, dict):
        return _shorten(error.body.get("message") or json.dumps(error.body))
    return _shorten(error)


def _shorten(text: object) -> str:
    return " ".join(str(text).split())[:200]
