"""Measuring states on running servers: every request brings its state, no server restarts.

Knows nothing about how a server prunes. Needs `vllm serve` with this plugin and
``--autoprune-requests states``. The reference answer is part of the prompt and its log-probability
is read from the prompt, so an example is one prefill of K tokens and no decoding.

All requests of all jobs are in flight together, up to ``at_once`` a server, which is one continuous
batch there. Requests about one image follow each other, so its vision features are computed once.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from offline_search.answers import Answers
from offline_search.evaluators.protocol import EvaluationFailed, Job
from offline_search.examples import Dataset, Example
from vllm_autoprune.errors import ConfigError, Problem, SearchError
from vllm_autoprune.tpdsl.states.load import load_state
from vllm_autoprune.tpdsl.states.state import PruningState
from vllm_autoprune.tpdsl.tokens import VisualTokens

FLAG = "--autoprune-requests states"

AT_ONCE = 128
"""Requests in flight a server. On two cores an answer took 16 ms of processor time with 128, 23 ms
with 32 and 45 ms with one: whatever a step of the engine costs is shared."""

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
"""Long: a request may wait for all that are in flight with it."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Attempts at one request, and seconds before the second; each further wait is twice that."""

    attempts: int = 4
    first_wait: float = 1.0


class _Room:
    """Requests that one server has in flight, each on a client of its own with one connection.

    A client with many connections looks at all of them for every request: with 128 that took
    longer than the model.
    """

    def __init__(self, at_once: int) -> None:
        self._free: asyncio.LifoQueue[httpx.AsyncClient] = asyncio.LifoQueue()
        trusted = httpx.create_ssl_context()
        for _ in range(at_once):
            self._free.put_nowait(httpx.AsyncClient(timeout=_TIMEOUT, verify=trusted))

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client that nobody else uses meanwhile, when one is free: first come, first served."""
        client = await self._free.get()
        try:
            yield client
        finally:
            self._free.put_nowait(client)

    async def close(self) -> None:
        """Close the connections of those that are free."""
        while not self._free.empty():
            await self._free.get_nowait().aclose()


class ServedEvaluator:
    """One or several servers of the same model that share the work."""

    def __init__(
        self,
        urls: Sequence[str],
        dataset: Dataset,
        *,
        model: str | None = None,
        at_once: int = AT_ONCE,
        patience: Patience | None = None,
        probes: Sequence[VisualTokens] = (),
    ) -> None:
        """``urls`` without ``/v1``; ``probes`` are images as the served model sees them."""
        self.dataset = dataset
        self.name = ""
        self._urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self._model = model or ""
        self._patience = patience or Patience()
        self._probes = probes
        self._rooms = [_Room(at_once) for _ in urls]
        self._images: dict[str, str] = {}

    def probes(self) -> Sequence[VisualTokens]:
        """As given: an HTTP client cannot know what a model sees."""
        return self._probes

    async def prepare(self) -> None:
        """One question with a state to every server; raises :class:`ConfigError` that says why."""
        problems: list[Problem] = []
        names: set[str] = set()
        for place, url in enumerate(self._urls):
            try:
                self._model = await self._served(place)
                names.add(self._model)
                await self._try_state(place)
            except httpx.HTTPError as error:
                what = f"does not answer ({type(error).__name__})"
                problems.append(Problem(url, what, "start the server, or correct its address"))
            except EvaluationFailed as error:
                fix = f"serve the model with {FLAG} --autoprune-state {{NAME}}"
                problems.append(Problem(url, str(error), fix))
        if len(names) > 1:
            what = f"serve different models: {', '.join(sorted(names))}"
            problems.append(Problem("--server-url", what, "give servers of one model"))
        if problems:
            raise ConfigError("servers", problems)
        self.name = f"{self._model} through vLLM, data {self.dataset.digest[:12]}"

    async def evaluate(self, job: Job) -> Answers:
        """Every example of a job, each on the server that its image belongs to."""
        examples = self.dataset.of(job.split)[job.start : job.stop]
        pruning = _pruning(job.state, job.budget)
        found = await asyncio.gather(*(self._ask(example, pruning) for example in examples))
        return Answers(tuple(value for value, _ in found), tuple(right for _, right in found))

    async def close(self) -> None:
        """Close all connections."""
        for room in self._rooms:
            await room.close()

    async def _served(self, place: int) -> str:
        async with self._rooms[place].connection() as client:
            answer = await client.get(f"{self._urls[place]}/v1/models")
        answer.raise_for_status()
        models = answer.json()["data"]
        names = [str(model["id"]) for model in models]
        if self._model and self._model not in names:
            raise EvaluationFailed(f"serves {', '.join(names)}, not {self._model}")
        return self._model or names[0]

    async def _try_state(self, place: int) -> None:
        example = self.dataset.of("search")[0]
        await self._once(place, example, _pruning(load_state("cdpruner"), 1))

    async def _ask(self, example: Example, pruning: Mapping[str, object]) -> tuple[float, bool]:
        place = int.from_bytes(hashlib.sha256(example.image.encode()).digest()[:4], "big")
        wait, failure = self._patience.first_wait, ""
        for attempt in range(self._patience.attempts):
            # An image stays with a server that has its features, until that server fails it.
            server = (place + attempt) % len(self._urls)
            try:
                return await self._once(server, example, pruning)
            except EvaluationFailed as error:
                # Refused: what is wrong with a request is still wrong the next time.
                raise EvaluationFailed(f"{self._urls[server]}: {error}") from None
            except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError) as error:
                failure = f"{type(error).__name__}: {error}"[:300]
            if attempt + 1 < self._patience.attempts:
                await asyncio.sleep(wait)
                wait *= 2
        if not await self._any_answers():
            # Nothing is wrong with the candidate: whatever is proposed next would fail as well.
            raise SearchError(
                f"no server answers any more ({failure}) -> start it and resume: nothing is lost"
            )
        raise EvaluationFailed(f"{failure}, after {self._patience.attempts} attempts")

    async def _any_answers(self) -> bool:
        for url, room in zip(self._urls, self._rooms, strict=True):
            with contextlib.suppress(httpx.HTTPError):
                async with room.connection() as client:
                    if (await client.get(f"{url}/v1/models")).is_success:
                        return True
        return False

    async def _once(
        self, place: int, example: Example, pruning: Mapping[str, object]
    ) -> tuple[float, bool]:
        async with self._rooms[place].connection() as client:
            image = self._image(example)
            body = reference_body(self._model, image, example.question, example.answer, pruning)
            url = f"{self._urls[place]}/v1/chat/completions"
            answer = await client.post(url, json=body)
        if answer.status_code in (400, 401, 403, 404, 422):
            raise EvaluationFailed(f"status {answer.status_code}: {_message(answer.text)}")
        answer.raise_for_status()
        return read_reference(answer.json()["prompt_logprobs"], example.answer)

    def _image(self, example: Example) -> str:
        if example.image not in self._images:
            content = base64.b64encode(self.dataset.image(example)).decode()
            self._images[example.image] = f"data:image/png;base64,{content}"
        return self._images[example.image]


def _pruning(state: PruningState | None, budget: int) -> Mapping[str, object]:
    if state is None:
        return {"enabled": False}
    policy = state.model_dump(mode="json", exclude={"provenance"})
    return {"policy": policy, "budget": budget}


def reference_body(
    model: str, image: str, question: str, answer: str, pruning: Mapping[str, object]
) -> dict[str, object]:
    """A chat request whose prompt ends in the reference answer, each of its tokens scored.

    `image` is a URL; `pruning` is what the request says to the plugin.
    """
    parts = [
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "text", "text": question},
    ]
    return {
        "model": model,
        "messages": [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": answer},
        ],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
        "mm_processor_kwargs": {"autoprune": pruning},
    }


def read_reference(prompt: Sequence[Mapping[str, Any] | None], answer: str) -> tuple[float, bool]:
    """Log-probability of the answer at the end of a prompt, and whether greedy would say it.

    The answer's tokens are those at the end whose text makes it up.
    """
    total, right, said = 0.0, True, ""
    for position in reversed(prompt):
        if not position:
            break
        # With no alternatives asked for, the one entry is the token that is there.
        (token,) = position.values()
        said = str(token["decoded_token"]) + said
        total += float(token["logprob"])
        right = right and token["rank"] == 1
        if said.strip() == answer.strip():
            return total, right
        if len(said.strip()) > len(answer.strip()):
            break
    raise EvaluationFailed(f"the prompt ends in {said!r}, not in the reference answer {answer!r}")


def _message(text: str) -> str:
    try:
        data = json.loads(text)
        return str(data["error"]["message"])[:400]
    except (ValueError, KeyError, TypeError):
        return text[:400]
