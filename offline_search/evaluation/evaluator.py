"""Evaluator protocol, and an evaluator that never measures anything twice."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from offline_search.candidates.selection_program import Candidate
from offline_search.dataset import Dataset, Split
from offline_search.evaluation.answers import NO_ANSWERS, Answers
from offline_search.ledger import Ledger
from offline_search.ledger.records import ALL_TOKENS, Clock, EvaluationRecord
from vllm_autoprune.errors import EvaluationFailed, SearchError
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
