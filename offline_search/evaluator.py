"""Evaluator protocol, and an evaluator that never measures anything twice."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import httpx

from offline_search.components import Candidate, SelectionProgram
from offline_search.dataset import Dataset, Split
from offline_search.history import NO_ANSWERS, Answers
from offline_search.ledger import ALL_TOKENS, Clock, EvaluationRecord, Ledger
from vllm_autoprune.errors import ConfigError, EvaluationFailed, Problem, SearchError
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.evaluation.scoring_request import (
    pruning_options,
    score_reference_answer,
    scoring_request,
)
from vllm_autoprune.http_client import MAX_IN_FLIGHT
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.tokens import VisualTokens

_DECIMALS = 5
"""Recorded decimals of a log-probability; bfloat16 is less precise than that."""


class BaselineFailed(SearchError):
    """The unpruned model or the base policy could not be measured, which ends a search."""


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """Examples ``start`` to ``stop`` of a split at K = ``budget``; unpruned without a candidate."""

    candidate: Candidate | None
    budget: int
    split: Split
    start: int
    stop: int


class Evaluator(Protocol):
    """Measures candidates on one model and data set; jobs may run concurrently."""

    @property
    def name(self) -> str:
        """Identifies the model, and the questions without the content of their images."""

    @property
    def dataset(self) -> Dataset:
        """The examples."""

    def probes(self) -> Sequence[VisualTokens]:
        """Visual tokens of a few search images, to detect duplicate states; may be empty."""

    async def prepare(self) -> None:
        """Check that evaluation is possible; raises :class:`ConfigError` if not."""

    async def evaluate(self, job: EvaluationJob) -> Answers:
        """The answers to a job, in its order; raises :class:`EvaluationFailed`."""

    async def close(self) -> None:
        """Close connections."""


class RecordedEvaluator:
    """Evaluator that records answers in the ledger and returns recorded ones.

    A failure of the unpruned model or the base policy is not recorded, so that the search can be
    resumed once its cause is gone.
    """

    def __init__(self, ledger: Ledger, evaluator: Evaluator, base_digest: str = "") -> None:
        self._ledger = ledger
        self._evaluator = evaluator
        self._baselines = {ALL_TOKENS: "the model without pruning", base_digest: "the base policy"}

    async def evaluate(self, job: EvaluationJob) -> Answers:
        """The answers to a job.

        Raises :class:`EvaluationFailed`, also for a recorded failure, and :class:`BaselineFailed`.
        """
        if job.start == job.stop:
            return NO_ANSWERS
        known = self._ledger.find(EvaluationRecord, _empty_record(job).key)
        record = known or await self._measure(job)
        if record.failure:
            raise EvaluationFailed(record.failure)
        return Answers(record.logprob, tuple(bit == "1" for bit in record.right))

    async def _measure(self, job: EvaluationJob) -> EvaluationRecord:
        start, started_at = time.monotonic(), time.time()
        try:
            answers = await self._evaluator.evaluate(job)
            if not all(map(math.isfinite, answers.logprob)):
                raise EvaluationFailed("a log-probability of a reference answer is not finite")
            logprob = tuple(round(value, _DECIMALS) for value in answers.logprob)
            right, failure = "".join("01"[correct] for correct in answers.right), ""
        except EvaluationFailed as error:
            if baseline := self._baselines.get(_empty_record(job).digest):
                raise BaselineFailed(
                    f"{baseline} cannot be measured on the {job.split} split: {error} -> mend the "
                    "server and resume, or mend the questions and begin a new ledger"
                ) from None
            logprob, right, failure = (), "", str(error)
        clock = Clock(at=started_at, seconds=round(time.monotonic() - start, 3))
        result = {"logprob": logprob, "right": right, "failure": failure, "clock": clock}
        return self._ledger.put(_empty_record(job).model_copy(update=result))


def _empty_record(job: EvaluationJob) -> EvaluationRecord:
    return EvaluationRecord(
        split=job.split,
        digest=ALL_TOKENS if job.candidate is None else job.candidate.digest,
        budget=0 if job.candidate is None else job.budget,
        start=job.start,
        stop=job.stop,
    )


REQUIRED_FLAG = "--autoprune-requests states"

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
"""Long, because a request may wait for all others that are in flight."""

_PERMANENT_FAILURES = (400, 401, 403, 404, 422)
"""HTTP status codes that a retry cannot change."""

_MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError)
"""What reading an answer raises that is not JSON, or has other fields."""


class _RequestRefused(EvaluationFailed):
    """A server answered with a status that a retry cannot change."""


class _MalformedAnswer(SearchError):
    """An answer is not JSON, or lacks what was requested."""


_FAILURES = (httpx.HTTPError, httpx.InvalidURL, _MalformedAnswer, EvaluationFailed)
"""What a request to a server raises."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Attempts at one request, and seconds before the second; every further wait doubles."""

    attempts: int = 4
    first_wait: float = 1.0


class _ClientPool:
    """HTTP clients for one server, with one connection each.

    A single httpx client scans all of its connections for every request; with 128 connections that
    took longer than the model.
    """

    def __init__(self, size: int) -> None:
        self._free: asyncio.LifoQueue[httpx.AsyncClient] = asyncio.LifoQueue()
        ssl_context = httpx.create_ssl_context()
        for _ in range(size):
            self._free.put_nowait(httpx.AsyncClient(timeout=_TIMEOUT, verify=ssl_context))

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """A free client for exclusive use; waits in order of arrival until there is one."""
        client = await self._free.get()
        try:
            yield client
        finally:
            self._free.put_nowait(client)

    async def close(self) -> None:
        """Close all free clients."""
        while not self._free.empty():
            await self._free.get_nowait().aclose()


class ServedEvaluator:
    """Evaluator on one or several servers of the same model, which share the images."""

    def __init__(
        self,
        urls: Sequence[str],
        dataset: Dataset,
        *,
        model: str | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        retry_policy: RetryPolicy | None = None,
        probes: Sequence[VisualTokens] = (),
    ) -> None:
        """``urls`` with or without ``/v1``; ``probes`` from the served model's checkpoint."""
        self.dataset = dataset
        self.name = ""
        self._urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self._model = model or ""
        self._retry_policy = retry_policy or RetryPolicy()
        self._probes = probes
        self._pools = [_ClientPool(max_in_flight) for _ in urls]
        self._image_urls: dict[str, str] = {}

    def probes(self) -> Sequence[VisualTokens]:
        """The probes given at construction; they cannot be read over HTTP."""
        return self._probes

    async def prepare(self) -> None:
        """Send one request with a state to every server; raises :class:`ConfigError` on failure."""
        problems: list[Problem] = []
        models: dict[int, list[str]] = {}
        for server, url in enumerate(self._urls):
            try:
                models[server] = await self._list_models(server)
            except _FAILURES as error:
                problems.append(_describe_failure(url, error))
        problems += self._choose_model(models)
        for server, names in models.items():
            if self._model not in names:
                continue
            try:
                await self._try_state(server)
            except _FAILURES as error:
                problems.append(_describe_failure(self._urls[server], error))
        if problems:
            raise ConfigError("servers", problems)
        self.name = f"{self._model} through vLLM, data {self.dataset.digest[:12]}"

    async def evaluate(self, job: EvaluationJob) -> Answers:
        """Answers to a job; every example goes to the server that its image is assigned to."""
        examples = self.dataset.examples(job.split)[job.start : job.stop]
        if isinstance(job.candidate, SelectionProgram):
            raise EvaluationFailed("a server measures states only, not programs that select tokens")
        pruning = pruning_options(job.candidate, job.budget)
        scores = await asyncio.gather(*(self._score(example, pruning) for example in examples))
        return Answers(tuple(value for value, _ in scores), tuple(right for _, right in scores))

    async def close(self) -> None:
        """Close all connections."""
        for pool in self._pools:
            await pool.close()

    async def _list_models(self, server: int) -> list[str]:
        """Names of the models that a server serves, at least one."""
        async with self._pools[server].client() as client:
            response = await client.get(f"{self._urls[server]}/v1/models")
        response.raise_for_status()
        try:
            names = [str(model["id"]) for model in response.json()["data"]]
        except _MALFORMED:
            names = []
        if not names:
            raise _MalformedAnswer("lists no model at /v1/models")
        return names

    def _choose_model(self, models: Mapping[int, Sequence[str]]) -> list[Problem]:
        """Evaluate the given model, else the first of the first server; all must serve it."""
        if self._model:
            fix = "correct --server-model, or serve that model"
            return [
                Problem(self._urls[server], f"serves {', '.join(names)}, not {self._model}", fix)
                for server, names in models.items()
                if self._model not in names
            ]
        firsts = list(dict.fromkeys(names[0] for names in models.values()))
        self._model = firsts[0] if firsts else ""
        if all(self._model in names for names in models.values()):
            return []
        fix = "give servers of one model, or name one that all serve with --server-model"
        return [Problem("--server-url", f"serve different models: {', '.join(firsts)}", fix)]

    async def _try_state(self, server: int) -> None:
        example = self.dataset.examples("search")[0]
        await self._send(server, example, pruning_options(load_state("cdpruner"), 1))

    async def _score(self, example: Example, pruning: Mapping[str, object]) -> tuple[float, bool]:
        """Score one example, with retries."""
        policy = self._retry_policy
        assigned = int.from_bytes(hashlib.sha256(example.image.encode()).digest()[:4], "big")
        wait, failure = policy.first_wait, ""
        for attempt in range(policy.attempts):
            # All requests about an image go to one server, which caches its features; a retry goes
            # to the next server.
            server = (assigned + attempt) % len(self._urls)
            try:
                return await self._send(server, example, pruning)
            except EvaluationFailed as error:
                # The server refused the request; a retry would be refused as well.
                raise EvaluationFailed(f"{self._urls[server]}: {error}") from None
            except (httpx.HTTPError, _MalformedAnswer) as error:
                failure = f"{type(error).__name__}: {error}"[:300]
            if attempt + 1 < policy.attempts:
                await asyncio.sleep(wait)
                wait *= 2
        if not await self._any_server_responds():
            # Not the candidate's fault: every further candidate would fail as well.
            raise SearchError(
                f"no server answers any more ({failure}) -> start it and resume: nothing is lost"
            )
        raise EvaluationFailed(f"{failure}, after {policy.attempts} attempts")

    async def _any_server_responds(self) -> bool:
        for url, pool in zip(self._urls, self._pools, strict=True):
            with contextlib.suppress(httpx.HTTPError):
                async with pool.client() as client:
                    if (await client.get(f"{url}/v1/models")).is_success:
                        return True
        return False

    async def _send(
        self, server: int, example: Example, pruning: Mapping[str, object]
    ) -> tuple[float, bool]:
        async with self._pools[server].client() as client:
            image = self._image_url(example)
            body = scoring_request(self._model, image, example.question, example.answer, pruning)
            url = f"{self._urls[server]}/v1/chat/completions"
            response = await client.post(url, json=body)
        if response.status_code in _PERMANENT_FAILURES:
            raise _RequestRefused(f"status {response.status_code}: {_error_message(response.text)}")
        response.raise_for_status()
        try:
            return score_reference_answer(response.json()["prompt_logprobs"], example.answer)
        except _MALFORMED as error:
            reason = f"{type(error).__name__}: {error}"[:200]
            raise _MalformedAnswer(
                f"answers without the log-probabilities of the prompt ({reason})"
            ) from None

    def _image_url(self, example: Example) -> str:
        if example.image not in self._image_urls:
            content = base64.b64encode(self.dataset.image_bytes(example)).decode()
            self._image_urls[example.image] = f"data:image/png;base64,{content}"
        return self._image_urls[example.image]


def _describe_failure(url: str, error: Exception) -> Problem:
    """Why a server cannot be used, from what a request to it raised."""
    address = "give the address of a vllm serve, such as http://localhost:8000"
    what, fix = str(error), address
    if isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol):
        what = f"is no address of a server ({error})"
    elif isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        what = f"answers with status {status}: {_error_message(error.response.text)}"
        if status in (401, 403):
            fix = "serve the model without an API key: a search sends none"
        elif status >= 500:
            fix = "look into the server's log"
    elif isinstance(error, httpx.HTTPError):
        what, fix = (
            f"does not answer ({type(error).__name__})",
            "start the server, or correct its address",
        )
    elif isinstance(error, _RequestRefused):
        fix = f"serve the model with {REQUIRED_FLAG} --autoprune-state {{NAME}}"
    elif isinstance(error, EvaluationFailed):
        fix = "serve the model with a chat template that ends with the answer that it is given"
    return Problem(url, what, fix)


def _error_message(text: str) -> str:
    try:
        data = json.loads(text)
        return str(data["error"]["message"])[:400]
    except (ValueError, KeyError, TypeError):
        return text[:400]
