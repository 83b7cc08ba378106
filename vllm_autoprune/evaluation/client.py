"""Client that scores reference answers on a running server, from their prompt log-probabilities.

The reference answer is part of the prompt, so a request takes one prefill and one token. The answer
is right if greedy decoding gives it and then stops or starts another word.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from vllm_autoprune.errors import ConfigError, EvaluationFailed, Problem
from vllm_autoprune.evaluation.records import Answer, Case, EvaluationError, Question
from vllm_autoprune.evaluation.scoring_request import score_reference_answer, scoring_request

REJECTED = "status 4"
"""How the failure of a request begins that the server rejected, and would reject again."""

_TIMEOUT = httpx.Timeout(120.0, connect=10.0)
_ATTEMPTS = 3
_DIGITS = 5
"""Decimals of log-probabilities; bfloat16 has less precision."""

MAX_IN_FLIGHT = 128
"""Concurrent requests a server. On two cores an answer took 16 ms of processor time with 128, 23 ms
with 32 and 45 ms with one, because requests share the cost of an engine step."""


@dataclass(frozen=True)
class PreparedQuestion:
    """One question with its prompt, reference answer and image."""

    record: Question
    text: str
    answer: str
    image: str
    """A ``data:`` URL; questions about one image share one object."""


def questions_digest(questions: Sequence[PreparedQuestion]) -> str:
    """First twelve digits of the SHA-256 over questions, answers and images."""
    digest = hashlib.sha256()
    for one in questions:
        digest.update(f"{one.text}\n{one.answer}\n{one.image}\n".encode())
    return digest.hexdigest()[:12]


class AnswerClient:
    """Client of one server."""

    def __init__(self, url: str, max_in_flight: int, wait: float = 1.0) -> None:
        """``wait``: seconds before the second attempt, doubled for the third."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._wait = wait
        self._model = ""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=max_in_flight)
        self._client = httpx.AsyncClient(timeout=_TIMEOUT, limits=limits)

    async def select_model(self, model: str | None) -> None:
        """Check that the server answers and serves the model; raises :class:`ConfigError`."""
        try:
            answer = await self._client.get(f"{self._url}/v1/models")
            answer.raise_for_status()
            names = [str(one["id"]) for one in answer.json()["data"]]
        except (httpx.UnsupportedProtocol, httpx.InvalidURL):
            fix = "give it as http://HOST:PORT"
            problem = Problem(self._url, "is not the address of a server", fix)
            raise ConfigError("eval", [problem]) from None
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            what = f"does not answer ({type(error).__name__})"
            fix = "start the server, or correct its address"
            raise ConfigError("eval", [Problem(self._url, what, fix)]) from None
        if not names or (model is not None and model not in names):
            what, fix = f"serves {', '.join(names) or 'nothing'}", f"serve {model or 'a model'}"
            raise ConfigError("eval", [Problem(self._url, what, fix)])
        self._model = model or names[0]

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def score(self, case: Case, question: PreparedQuestion) -> Answer:
        """The scored answer, or the failure after three attempts.

        Raises :class:`EvaluationError` if the server has stopped answering.
        """
        wait, failure = self._wait, ""
        for attempt in range(_ATTEMPTS):
            try:
                return await self._request(case, question)
            except EvaluationFailed as error:
                # The server rejected the request and would reject it again.
                return _failed(case, question, str(error))
            except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError) as error:
                failure = f"{type(error).__name__}: {error}"[:300]
            if attempt + 1 < _ATTEMPTS:
                await asyncio.sleep(wait)
                wait *= 2
        if not await self._is_alive():
            raise EvaluationError(
                f"{self._url} stopped answering ({failure}) -> start it again and add --resume: "
                "nothing is lost"
            )
        return _failed(case, question, failure)

    async def _is_alive(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return (await self._client.get(f"{self._url}/v1/models")).is_success
        return False

    async def _request(self, case: Case, question: PreparedQuestion) -> Answer:
        body = scoring_request(
            self._model, question.image, question.text, question.answer, case.pruning
        )
        response = await self._client.post(f"{self._url}/v1/chat/completions", json=body)
        if 400 <= response.status_code < 500:
            raise EvaluationFailed(describe_rejection(response))
        response.raise_for_status()
        content = response.json()
        logprob, right = score_reference_answer(content["prompt_logprobs"], question.answer)
        following = str(content["choices"][0]["message"]["content"] or "")
        return Answer(
            case=case.name,
            question=question.record.id,
            score=float(right and not following[:1].isalnum()),
            logprob=round(logprob, _DIGITS),
            prompt_tokens=int(content["usage"]["prompt_tokens"]),
        )


def describe_rejection(response: httpx.Response) -> str:
    """Status and message of a response that is an error, on one line."""
    text = response.text
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(response.json()["error"]["message"])
    return f"status {response.status_code}: {' '.join(text.split())[:300]}"


def _failed(case: Case, question: PreparedQuestion, failure: str) -> Answer:
    return Answer(case=case.name, question=question.record.id, failure=failure)
