"""Evaluators: the protocol, one that records in the ledger, and one that asks running servers.
A server is `vllm serve` with this plugin and ``--autoprune-requests states``: every request carries
its state, so no server restarts. The reference answer is part of the prompt and is scored by prompt
log-probabilities: an example costs one prefill of K tokens and no decoding.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from pydantic import BaseModel, ValidationError

from offline_search.dataset import Dataset, Split
from offline_search.default_state import find_default_state
from offline_search.history import Answers
from offline_search.image_facts import ImageFacts
from offline_search.ledger import ALL_TOKENS, Clock, EvaluationRecord, Ledger
from offline_search.probes import Probes
from vllm_autoprune.connection import Connection
from vllm_autoprune.errors import (
    ConfigError,
    EvaluationFailed,
    Problem,
    Refusal,
    SearchError,
)
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.evaluation.scoring_request import (
    AnswerChanged,
    pruning_options,
    read_scored_answer,
    score_answer,
    scoring_request,
)
from vllm_autoprune.http_client import (
    FAILURES,
    AsyncServerClient,
    RequestRefused,
    ServerClient,
    ServerLost,
    describe_failure,
)
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.state import PruningState

_CHECKED_IMAGES = 8
_DECIMALS = 5
"""Recorded decimals of a log-probability; bfloat16 is less precise than that."""


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """Examples ``start`` to ``stop`` of a split at K = ``budget``; no candidate means unpruned."""

    candidate: PruningState | None
    budget: int | str
    split: Split
    start: int
    stop: int


class Evaluator(Protocol):
    """Measures candidates on a data set and a model, or several; jobs may run concurrently."""

    @property
    def name(self) -> str:
        """Identifier of the model and of the questions, without the content of their images."""

    @property
    def dataset(self) -> Dataset:
        """The examples."""

    @property
    def image_facts(self) -> Mapping[str, ImageFacts]:
        """Facts about the images by model, of a single model by the empty name.

        Empty if none are known, or if they are those of the probes.
        """

    def probes(self) -> Probes:
        """Visual tokens of a few search images, to detect duplicate states; may be empty."""

    async def evaluate(self, job: EvaluationJob) -> Answers:
        """The answers to a job, in its order; raises :class:`EvaluationFailed`."""


class RecordedEvaluator:
    """Evaluator that records answers in the ledger and returns recorded ones.

    A failure of the unpruned model or the base policy is not recorded, so that the search can be
    resumed once its cause is gone.
    """

    def __init__(
        self, ledger: Ledger, evaluator: Evaluator, base_digest: str = ""
    ) -> None:
        self._ledger = ledger
        self._evaluator = evaluator
        self._baselines = {
            ALL_TOKENS: "the model without pruning",
            base_digest: "the base policy",
        }

    async def evaluate(self, job: EvaluationJob) -> Answers:
        """The answers to a job.

        Raises :class:`EvaluationFailed`, also for a recorded failure, and :class:`SearchError` for
        one of the unpruned model or the base policy, which ends a search.
        """
        if job.start == job.stop:
            return Answers()
        record = EvaluationRecord(
            split=job.split,
            digest=ALL_TOKENS if job.candidate is None else job.candidate.digest,
            budget=0 if job.candidate is None else job.budget,
            start=job.start,
            stop=job.stop,
        )
        recorded = self._ledger.find(EvaluationRecord, record.key)
        if recorded is None:
            result = await self._measure(job, record.digest)
            recorded = self._ledger.put(record.model_copy(update=result))
        if recorded.failure:
            raise EvaluationFailed.of(f"the {job.split} split", recorded.failure)
        correct = tuple(digit == "1" for digit in recorded.right)
        return Answers(recorded.logprob, correct)

    async def _measure(self, job: EvaluationJob, digest: str) -> dict[str, object]:
        """Fields of the record of a measurement: the answers, or the candidate's failure."""
        result: dict[str, object] = {}
        started_at = time.time()
        start = time.monotonic()
        try:
            answers = await self._evaluator.evaluate(job)
            if not all(map(math.isfinite, answers.logprob)):
                what = "a log-probability of a reference answer is not finite"
                questions = f"questions {job.start} to {job.stop}"
                raise EvaluationFailed.of(questions, what)
            rounded = tuple(round(value, _DECIMALS) for value in answers.logprob)
            result["logprob"] = rounded
            result["right"] = "".join("01"[correct] for correct in answers.right)
        except EvaluationFailed as error:
            if baseline := self._baselines.get(digest):
                raise SearchError.of(
                    f"{baseline} cannot be measured on the {job.split} split",
                    str(error),
                    "mend the server and resume, or mend the questions and begin a new ledger",
                ) from None
            result["failure"] = error.reason
        seconds = round(time.monotonic() - start, 3)
        return result | {"clock": Clock(at=started_at, seconds=seconds)}


class _ServedInputs(BaseModel):
    """The fields that are read of a server's ``/v1/autoprune``; None if it does not have them."""

    architecture: str = ""
    unavailable: list[str] | None = None
    sign: int | None = None


class ServedEvaluator:
    """Evaluator on servers of one model or of several; those of a model divide the images.

    With several models, every question of the data set is asked of each. Requests of all jobs are
    in flight together and form one continuous batch on a server. Requests about an image are
    consecutive and go to one server of a model, so that its features are computed once.
    """

    def __init__(
        self,
        urls: Sequence[str],
        dataset: Dataset,
        *,
        model: str | None = None,
        connection: Connection | None = None,
        first_wait: float = 1.0,
        probes: Probes | None = None,
    ) -> None:
        """``model`` is one that all servers have; ``probes`` are of the only model that is served.

        ``first_wait``: seconds before the first retry.
        """
        self.dataset = dataset
        self.name = ""
        self.image_facts: Mapping[str, ImageFacts] = {}
        self._connection = connection
        self._servers = {
            url: AsyncServerClient(url, connection=connection) for url in urls
        }
        self._required_model = model or ""
        self._urls_of = {self._required_model: list(urls)}
        self._first_wait = first_wait
        self._probes = probes or {}

    def probes(self) -> Probes:
        """The probes given at construction; they cannot be read over HTTP."""
        return self._probes

    @property
    def models(self) -> tuple[str, ...]:
        """The models of the servers if these have several; empty if they have one."""
        return tuple(self._urls_of) if len(self._urls_of) > 1 else ()

    async def prepare(self) -> None:
        """Choose the model of every server, and send it one request with a state.

        The model is the named one, else that of an earlier server if it has it, else its first.
        Raises :class:`ConfigError` with what is wrong with each server.
        """
        example = self.dataset.splits["search"][0]
        fields = {
            "mm_processor_kwargs": {
                "autoprune": pruning_options(load_state("cdpruner"), 1)
            }
        }
        messages = self.dataset.messages(example)
        problems: list[Problem] = []
        urls_of = dict[str, list[str]]()
        for url in self._servers:
            with ServerClient(url, self._connection) as server:
                try:
                    model = self._choose_model(server, urls_of)
                    urls_of.setdefault(model, []).append(url)
                    body = scoring_request(model, messages, example.answer, fields)
                    read_scored_answer(server.chat(body), example.answer)
                except RequestRefused as error:
                    (problem,) = error.problems
                    fix = problem.fix
                    if not fix or problem.kind == Refusal.NOT_ALLOWED:
                        fix = "start it with --autoprune-state NAME --autoprune-requests states"
                    problems.append(replace(problem, fix=fix))
                except EvaluationFailed as error:
                    fix = "give the address of a vllm serve"
                    if isinstance(error, AnswerChanged):
                        fix = "serve it with a chat template that ends with the answer it is given"
                    problems.append(Problem(server.url, error.reason, fix))
                except (ConfigError, ServerLost) as error:
                    problems += [
                        replace(problem, where=server.url) for problem in error.problems
                    ]
                except FAILURES as error:
                    problems.append(describe_failure(server.url, error))
        if problems:
            raise ConfigError("servers", problems)
        # In one order, so that a search can be resumed with its servers in another.
        self._urls_of = dict(sorted(urls_of.items()))
        if self.models and self._probes:
            what = f"has the tokens of one model, not of {' and '.join(self.models)}"
            raise ConfigError("search", [Problem("--checkpoint", what, "leave it out")])
        self.dataset = self.dataset.ask_models(self.models)
        data = self.dataset.digest[:12]
        self.name = f"{' and '.join(self._urls_of)} through vLLM, data {data}"

    def _choose_model(self, server: ServerClient, chosen: Iterable[str]) -> str:
        """The named model, else one that is ``chosen`` already, else the server's first."""
        served = list(server.list_models())
        if not self._required_model:
            return next((model for model in chosen if model in served), served[0])
        if self._required_model not in served:
            fix = f"serve {self._required_model}, or name a model of all with --server-model"
            what = f"serves {', '.join(served)}, not {self._required_model}"
            raise ConfigError("servers", [Problem(server.url, what, fix)])
        return self._required_model

    async def check_budget(self, budget: int | str) -> None:
        """Raise :class:`ConfigError` for a K at which the first search images keep all tokens.

        Of several models, each is checked.
        """
        for model in self._urls_of:
            await self._check_budget_of(model, budget)

    async def _check_budget_of(self, model: str, budget: int | str) -> None:
        lengths = dict[int | str, int]()
        for example in self._list_first_examples(model):
            for tokens in (0, budget, 1):
                try:
                    lengths[tokens] = await self._count_prompt(example, tokens)
                except EvaluationFailed:
                    return  # measuring the base policy will report the reason
                if tokens == budget and lengths[budget] < lengths[0]:
                    return
        if lengths[1] == lengths[0]:
            what = "prunes nothing: with K = 1 a prompt is as long as without"
            fix = "install vllm-autoprune where it runs, and serve with --autoprune-requests states"
            url = self._servers[self._urls_of[model][0]].url
            raise ConfigError("servers", [Problem(url, what, fix)])
        count = lengths[0] - lengths[1] + 1
        what = f"{budget} keeps all tokens: an image has {count}"
        if self.models:
            what += f" on {model}"
        raise ConfigError(
            "search", [Problem("--budget", what, f"give less than {count}")]
        )

    async def read_image_facts(self) -> None:
        """Set the image facts: N of the first search images, and facts from the server's page.

        N follows from the lengths of prompts. A server without the page gives no facts.
        """
        facts = {model: await self._read_facts_of(model) for model in self._urls_of}
        self.image_facts = {
            model if self.models else "": known
            for model, known in facts.items()
            if known is not None
        }

    async def _read_facts_of(self, model: str) -> ImageFacts | None:
        counts = set[int]()
        for example in self._list_first_examples(model):
            with contextlib.suppress(EvaluationFailed):
                unpruned = await self._count_prompt(example, 0)
                counts.add(unpruned - await self._count_prompt(example, 1) + 1)
        if not counts:
            return None
        page = self._read_page(model)
        has_cls = None
        if page.unavailable is not None:
            has_cls = "cls_attention" not in page.unavailable
        return ImageFacts(tuple(sorted(counts)), has_cls=has_cls, sign=page.sign)

    def find_default_state(self) -> str:
        """The default state of the served model's family; empty if it is not known.

        Also empty if the families of several models have different ones.
        """
        names = {
            find_default_state(model, self._read_page(model).architecture)
            for model in self._urls_of
        }
        return names.pop() if len(names) == 1 else ""

    def _read_page(self, model: str) -> _ServedInputs:
        url = self._urls_of[model][0]
        with (
            ServerClient(url, self._connection) as server,
            contextlib.suppress(*FAILURES, ValidationError),
        ):
            return _ServedInputs.model_validate(server.read_served())
        return _ServedInputs()

    def _list_first_examples(self, model: str) -> list[Example]:
        """One example of a model for each of the first search images."""
        examples = {
            example.image: example
            for example in self.dataset.splits["search"]
            if example.model in ("", model)
        }
        return list(islice(examples.values(), _CHECKED_IMAGES))

    async def _count_prompt(self, example: Example, budget: int | str) -> int:
        """Number of tokens of the prompt at K = ``budget``; a budget of 0 means all tokens."""
        state = load_state("cdpruner") if budget else None
        *_, length = await self._score(example, pruning_options(state, budget))
        return length

    async def evaluate(self, job: EvaluationJob) -> Answers:
        """Answers to a job.

        Every example goes to the server of its model that its image is assigned to, and to the next
        after a failure.
        """
        pruning = pruning_options(job.candidate, job.budget)
        examples = self.dataset.splits[job.split][job.start : job.stop]
        scores = await asyncio.gather(
            *(self._score(example, pruning) for example in examples)
        )
        logprobs, right, _ = zip(*scores, strict=True)
        return Answers(logprobs, right)

    async def _score(
        self, example: Example, pruning: Mapping[str, object]
    ) -> tuple[float, bool, int]:
        """Log-probability of the answer, whether it is right, and the tokens of the prompt."""
        model = example.model or next(iter(self._urls_of))
        servers = [self._servers[url] for url in self._urls_of[model]]
        place = int.from_bytes(
            hashlib.sha256(example.image.encode()).digest()[:4], "big"
        )
        place %= len(servers)
        try:
            scored = await score_answer(
                [*servers[place:], *servers[:place]],
                model,
                self.dataset.messages(example),
                example.answer,
                {"mm_processor_kwargs": {"autoprune": pruning}},
                first_wait=self._first_wait,
            )
        except ServerLost as error:
            # The candidate is not the cause: every further candidate would fail as well.
            raise SearchError(error.subject, error.problems) from None
        return scored.logprob, scored.right, scored.prompt_tokens

    async def close(self) -> None:
        """Close all connections."""
        for server in self._servers.values():
            await server.close()
