"""Answers of states, measured once: what the ledger has is never asked again.

Knows nothing about which states are worth measuring.
"""

from __future__ import annotations

import time

from offline_search.answers import NONE, Answers
from offline_search.evaluators.protocol import EvaluationFailed, Evaluator, Job
from offline_search.ledger import Ledger
from offline_search.records import FULL, Clock, Evaluated

_DIGITS = 5
"""Decimals of a log-probability that are kept: bfloat16 has fewer to tell."""


class Measuring:
    """An evaluator with a memory."""

    def __init__(self, ledger: Ledger, evaluator: Evaluator) -> None:
        self._ledger = ledger
        self._evaluator = evaluator

    async def answers(self, job: Job) -> Answers:
        """The answers to a job; raises :class:`EvaluationFailed`, again where it failed before."""
        if job.start == job.stop:
            return NONE
        record = self._ledger.find(Evaluated, _record(job).key) or await self._measure(job)
        if record.failure:
            raise EvaluationFailed(record.failure)
        return Answers(record.logprob, tuple(bit == "1" for bit in record.right))

    async def _measure(self, job: Job) -> Evaluated:
        began, asked = time.monotonic(), time.time()
        try:
            found = await self._evaluator.evaluate(job)
            logprob = tuple(round(value, _DIGITS) for value in found.logprob)
            right, failure = "".join("01"[ok] for ok in found.right), ""
        except EvaluationFailed as error:
            logprob, right, failure = (), "", str(error)
        clock = Clock(at=asked, seconds=round(time.monotonic() - began, 3))
        said = {"logprob": logprob, "right": right, "failure": failure, "clock": clock}
        return self._ledger.put(_record(job).model_copy(update=said))


def _record(job: Job) -> Evaluated:
    return Evaluated(
        split=job.split,
        digest=FULL if job.state is None else job.state.digest,
        budget=0 if job.state is None else job.budget,
        start=job.start,
        stop=job.stop,
    )
