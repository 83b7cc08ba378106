"""A proposer behind any OpenAI-compatible endpoint: Qwen, DeepSeek, or a model vLLM serves.

Knows nothing about states. Retries are ours and bounded, so that how long an endpoint is waited for
is known; whatever is left after them is a failure with a reason, never an exception.
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

from offline_search.prompt import Messages
from offline_search.proposal import JsonObject
from offline_search.proposers.protocol import Reply
from offline_search.records import Cost
from vllm_autoprune.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class Price:
    """Money for a million tokens, read and written."""

    prompt: float = 0.0
    completion: float = 0.0

    def of(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Money for so many tokens."""
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / 1e6


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to ask, and how patiently."""

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
    at_once: int = 8
    seeded: bool = True
    """False for vLLM on a CPU, up to 0.32 at least: a request with a seed whose prompt is computed
    in chunks ends its engine ("CPU Generator does not use offset")."""


_HOPELESS = (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError)
"""What no retry fixes."""


class EndpointProposer:
    """Asks one endpoint. Where it lacks JSON Schemas, it is asked without from then on."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._client = AsyncOpenAI(
            base_url=endpoint.url, api_key=endpoint.key, max_retries=0, timeout=endpoint.timeout
        )
        self._room = asyncio.Semaphore(endpoint.at_once)
        self._constrains = True
        # Waits alone: what it draws reaches no record.
        self._dice = Random()

    async def prepare(self) -> None:
        """One short chat; raises :class:`ConfigError` for a wrong key, model or address."""
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
                where, fix = "--proposer-model", await self._served()
            elif error.status_code == 429 or error.status_code >= 500:
                return  # busy now; the search itself is patient
            else:
                fix = "look at what the endpoint says"
            what = f"refused with status {error.status_code} ({_said(error)})"
            raise ConfigError("proposer", [Problem(where, what, fix)]) from None
        except openai.OpenAIError as error:
            what = f"{self._endpoint.url} does not answer ({_said(error)})"
            raise ConfigError(
                "proposer", [Problem(where, what, "start the endpoint, or correct its address")]
            ) from None

    async def reply(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
        """One reply, within the retries and waits of the endpoint."""
        async with self._room:
            wait = self._endpoint.first_wait
            for attempt in range(self._endpoint.retries + 1):
                try:
                    return await self._once(messages, schema, seed)
                except _HOPELESS as error:
                    return Reply(None, f"{type(error).__name__}: {_said(error)}")
                except openai.BadRequestError as error:
                    if not self._constrains or schema is None:
                        return Reply(None, f"{type(error).__name__}: {_said(error)}")
                    self._constrains = False
                    continue
                except openai.OpenAIError as error:
                    failure = f"{type(error).__name__}: {_said(error)}"
                    if attempt == self._endpoint.retries:
                        return Reply(None, f"{failure}, after {attempt} retries")
                    await asyncio.sleep(self._patience(error, wait))
                    wait = min(2 * wait, self._endpoint.longest_wait)
                except (ValueError, TypeError, AttributeError, IndexError, RecursionError) as error:
                    # Not the JSON of a chat completion: the client trusts what it is sent.
                    return Reply(None, f"an answer that is no chat completion: {_short(error)}")
            return Reply(None, "the endpoint refuses the request with and without a JSON Schema")

    async def close(self) -> None:
        """Close the client's connections."""
        await self._client.close()

    async def _once(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
        endpoint = self._endpoint
        extra: dict[str, Any] = {"seed": seed} if endpoint.seeded else {}
        if self._constrains and schema is not None:
            named = {"name": "proposal", "schema": schema}
            extra["response_format"] = {"type": "json_schema", "json_schema": named}
        create: Callable[..., Awaitable[Any]] = self._client.chat.completions.create
        answer = await create(
            model=endpoint.model,
            messages=list(messages),
            temperature=endpoint.temperature,
            max_tokens=endpoint.reply_tokens,
            **extra,
        )
        usage = answer.usage
        asked = int(usage.prompt_tokens) if usage else 0
        written = int(usage.completion_tokens) if usage else 0
        cost = Cost(
            prompt_tokens=asked,
            completion_tokens=written,
            money=round(endpoint.price.of(asked, written), 9),
        )
        message = answer.choices[0].message
        text = message.content or message.refusal
        return Reply(text if isinstance(text, str) else "", "", cost)

    def _patience(self, error: openai.OpenAIError, wait: float) -> float:
        """Seconds to the next attempt: what the endpoint asks for, within bounds, and some chance.

        Chance keeps requests that were refused together from coming back together.
        """
        asked = ""
        if isinstance(error, openai.APIStatusError):
            asked = error.response.headers.get("retry-after", "")
        try:
            wait = float(asked)
        except ValueError:
            wait *= 1 + self._dice.random()
        return min(max(wait, 0.0), self._endpoint.longest_wait)

    async def _served(self) -> str:
        try:
            models = [model.id async for model in self._client.models.list()]
        except openai.OpenAIError:
            return "name a model that the endpoint has"
        return f"name a model that the endpoint has: {', '.join(models[:8])}"


def _said(error: openai.OpenAIError) -> str:
    if isinstance(error, openai.APIStatusError) and isinstance(error.body, dict):
        return _short(error.body.get("message") or json.dumps(error.body))
    return _short(error)


def _short(said: object) -> str:
    return " ".join(str(said).split())[:200]
