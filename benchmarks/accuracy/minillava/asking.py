"""One question to a running server: the reference answer is in the prompt, and is read from there.

Knows nothing about what is asked next. A request is one prefill and one token more. The answer
counts as right where greedy decoding would say it and then stop, or go on with another word.
"""

from __future__ import annotations

import asyncio
import contextlib

import httpx

from benchmarks.accuracy.errors import EvaluationError
from benchmarks.accuracy.minillava.model import Asked
from benchmarks.accuracy.records import Answer, Case
from offline_search.evaluation.evaluator import EvaluationFailed
from offline_search.evaluation.served_evaluator import score_reference_answer, scoring_request
from vllm_autoprune.errors import ConfigError, Problem

_TIMEOUT = httpx.Timeout(120.0, connect=10.0)
_ATTEMPTS = 3
_DIGITS = 5
"""Decimals of a log-probability that are kept: bfloat16 has fewer to tell."""


class Asker:
    """A client of one server."""

    def __init__(self, url: str, at_once: int, wait: float = 1.0) -> None:
        """``url`` without ``/v1``; ``wait``: seconds before a second attempt, then twice that."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._wait = wait
        self._model = ""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=at_once)
        self._client = httpx.AsyncClient(timeout=_TIMEOUT, limits=limits)

    async def prepare(self, model: str | None) -> None:
        """Look for the server and the model; raises :class:`ConfigError`."""
        try:
            answer = await self._client.get(f"{self._url}/v1/models")
            answer.raise_for_status()
            names = [str(one["id"]) for one in answer.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            what = f"does not answer ({type(error).__name__})"
            mend = "start the server, or correct its address"
            raise ConfigError("eval", [Problem(self._url, what, mend)]) from None
        if not names or (model is not None and model not in names):
            what, mend = f"serves {', '.join(names) or 'nothing'}", f"serve {model or 'a model'}"
            raise ConfigError("eval", [Problem(self._url, what, mend)])
        self._model = model or names[0]

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def ask(self, case: Case, asked: Asked) -> Answer:
        """The answer, or the failure that is left after three attempts.

        Raises :class:`EvaluationError` where the server does not answer at all any more.
        """
        wait, failure = self._wait, ""
        for attempt in range(_ATTEMPTS):
            try:
                return await self._once(case, asked)
            except EvaluationFailed as error:
                # What is wrong with a request is still wrong the next time.
                return _failed(case, asked, str(error))
            except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError) as error:
                failure = f"{type(error).__name__}: {error}"[:300]
            if attempt + 1 < _ATTEMPTS:
                await asyncio.sleep(wait)
                wait *= 2
        if not await self._answers():
            raise EvaluationError(
                f"{self._url} does not answer any more ({failure}) -> start it again and add "
                "--resume: nothing is lost"
            )
        return _failed(case, asked, failure)

    async def _answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return (await self._client.get(f"{self._url}/v1/models")).is_success
        return False

    async def _once(self, case: Case, asked: Asked) -> Answer:
        body = scoring_request(self._model, asked.image, asked.text, asked.answer, case.asked)
        answer = await self._client.post(f"{self._url}/v1/chat/completions", json=body)
        if 400 <= answer.status_code < 500:
            raise EvaluationFailed(f"status {answer.status_code}: {answer.text[:300]}")
        answer.raise_for_status()
        said = answer.json()
        logprob, right = score_reference_answer(said["prompt_logprobs"], asked.answer)
        after = str(said["choices"][0]["message"]["content"] or "")
        return Answer(
            case=case.name,
            question=asked.record.id,
            score=float(right and not after[:1].isalnum()),
            logprob=round(logprob, _DIGITS),
            prompt_tokens=int(said["usage"]["prompt_tokens"]),
        )


def _failed(case: Case, asked: Asked, failure: str) -> Answer:
    return Answer(case=case.name, question=asked.record.id, failure=failure)
