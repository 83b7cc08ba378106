"""Chat client of the demo: questions about images, sent concurrently."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.common import BenchmarkError
from benchmarks.common.client import EMPTY, Client, Record, build_body, build_content
from benchmarks.minillava.engine import MAX_ANSWER_TOKENS
from benchmarks.minillava.split import Example, png_url

SERVED_NAME = "mini-llava"
CONCURRENCY = 8
TIMEOUT = 120.0

Content = Sequence[Mapping[str, object]]
"""The parts of a user's message."""


@dataclass(frozen=True, slots=True)
class Query:
    """A question about an image, encoded before any clock starts.

    ``identity`` is sent as vLLM's ``uuid`` of the image.
    """

    content: Content
    identity: str

    def body(self, extra_body: Mapping[str, object]) -> bytes:
        """The body of a streamed, greedy request."""
        return build_body(SERVED_NAME, self.content, tokens=MAX_ANSWER_TOKENS, fields=extra_body)


@dataclass(frozen=True, slots=True)
class Answer:
    """The text of an answer, and the number of tokens of its prompt."""

    text: str
    prompt_tokens: int


def build_query(example: Example, split: str) -> Query:
    """The query of an example; ``split`` distinguishes the images of two splits."""
    identity = f"{split}-{example.image_id}"
    image, question = build_content(example.question, [png_url(example.image)])
    return Query([{**image, "uuid": identity}, question], identity)


def ask(url: str, query: Query, extra_body: Mapping[str, object]) -> Answer:
    """One answer, which may be empty; raises :class:`BenchmarkError` where there is none."""
    record = _send(url, query.body(extra_body))
    return Answer(record.text, record.prompt_tokens or 0)


def ask_all(
    url: str,
    queries: Iterable[tuple[Query, Mapping[str, object]]],
    advance: Callable[[], None],
    concurrency: int = CONCURRENCY,
) -> list[Answer]:
    """Answers in the order of queries, ``concurrency`` requests at a time."""
    pool = ThreadPoolExecutor(concurrency)
    answers = []
    try:
        for future in [pool.submit(ask, url, query, extra) for query, extra in queries]:
            answers.append(future.result())
            advance()
    finally:
        # Requests that are still running fail when the server ends, which must not wait for them.
        pool.shutdown(wait=False, cancel_futures=True)
    return answers


def _send(url: str, body: bytes) -> Record:
    record = Client(url, timeout=TIMEOUT).send(body)
    if record.error is not None and record.error != EMPTY:
        if record.status == 0 or record.status == 200:
            raise BenchmarkError(
                f"the server stopped answering; its log is in --out: {record.error}"
            )
        raise BenchmarkError(f"the server refused a question: {record.error}")
    return record
