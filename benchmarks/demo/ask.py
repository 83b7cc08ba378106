"""The client: questions about images through the official `openai` package, with and without clock.

Knows nothing about right answers or pruning; what a request says about that is handed to it.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from benchmarks.minillava.engine import MAX_ANSWER_TOKENS
from benchmarks.minillava.split import Example, png

SERVED_NAME = "mini-llava"
CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class Query:
    """A question in wire form; the image is encoded here, before any clock starts.

    ``identity`` goes along as vLLM's ``uuid`` of the image.
    """

    messages: list[ChatCompletionMessageParam]
    identity: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said, and how many tokens the prompt had."""

    text: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from sending to the first text and to the end, of one request alone."""

    ttft: float
    total: float
    answer: Answer


def query(example: Example, split: str) -> Query:
    """The query of an example; ``split`` tells the images of two splits apart."""
    url = "data:image/png;base64," + base64.b64encode(png(example.image)).decode()
    identity = f"{split}-{example.image_id}"
    content = [
        {"type": "image_url", "image_url": {"url": url}, "uuid": identity},
        {"type": "text", "text": example.question},
    ]
    # `uuid` is vLLM's own field, which the client's types do not know.
    message = cast("ChatCompletionMessageParam", {"role": "user", "content": content})
    return Query([message], identity)


class Client:
    """Asks one server; greedy, no retries, since a retry would hide a failure and its time."""

    def __init__(self, url: str) -> None:
        self._client = AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120.0
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    async def ask(self, asked: Query, extra_body: Mapping[str, object]) -> Answer:
        """One answer."""
        done = await self._client.chat.completions.create(
            model=SERVED_NAME,
            messages=asked.messages,
            temperature=0,
            max_tokens=MAX_ANSWER_TOKENS,
            extra_body=dict(extra_body),
        )
        assert done.usage is not None
        return Answer(done.choices[0].message.content or "", done.usage.prompt_tokens)

    async def ask_all(
        self,
        asked: Iterable[tuple[Query, Mapping[str, object]]],
        done: Callable[[], None],
        concurrency: int = CONCURRENCY,
    ) -> list[Answer]:
        """Answers in the order asked, ``concurrency`` requests at a time."""
        slots = asyncio.Semaphore(concurrency)

        async def one(item: Query, extra_body: Mapping[str, object]) -> Answer:
            async with slots:
                answer = await self.ask(item, extra_body)
            done()
            return answer

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item, extra)) for item, extra in asked]
        return [task.result() for task in tasks]

    async def timed(self, asked: Query, extra_body: Mapping[str, object]) -> Timing:
        """One streamed answer of exactly ``MAX_ANSWER_TOKENS`` tokens, with its times.

        The length is fixed so that a wrong answer, which may be shorter, is not a faster one.
        """
        text: list[str] = []
        first, prompt_tokens = None, 0
        start = time.perf_counter()
        stream = await self._client.chat.completions.create(
            model=SERVED_NAME,
            messages=asked.messages,
            temperature=0,
            max_tokens=MAX_ANSWER_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={**extra_body, "ignore_eos": True},
        )
        last = start
        async for chunk in stream:
            if chunk.choices:
                # The first chunk only names the role.
                last = time.perf_counter()
                said = chunk.choices[0].delta.content
                if said and first is None:
                    first = last
                text.append(said or "")
            if chunk.usage is not None:
                prompt_tokens = chunk.usage.prompt_tokens
        ttft = (last if first is None else first) - start
        return Timing(ttft, last - start, Answer("".join(text), prompt_tokens))


def texts(answers: Sequence[Answer]) -> list[str]:
    """Only what was said."""
    return [answer.text for answer in answers]
