"""Measure every case of a yardstick that the journal lacks, batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.accuracy.yardsticks.journal import BatchScores, YardstickJournal
from benchmarks.yardsticks.examples import Example, Split
from benchmarks.yardsticks.yardstick import Case, CaseScores, Yardstick, batch_digest, batches
from vllm_autoprune.evaluation.run import Progress

_DECIMALS = 4


@dataclass(frozen=True)
class CaseResult:
    """Scores of one case on all questions in order; tokens are the mean over images."""

    case: Case
    right: list[bool]
    logprob: list[float]
    tokens: float


@dataclass(frozen=True)
class Results:
    """All cases of one yardstick on the same questions."""

    yardstick: Yardstick
    examples: Sequence[Example]
    cases: Sequence[CaseResult]

    def find(self, name: str, budget: str) -> CaseResult | None:
        """The result of a named case at a budget."""
        for result in self.cases:
            if (result.case.name, result.case.budget.label) == (name, budget):
                return result
        return None


def measure(
    yardstick: Yardstick,
    cases: Sequence[Case],
    images: int,
    journal: YardstickJournal,
    progress: Progress,
    split: Split = "test",
) -> Results:
    """Scores of all cases on the questions about the first images of a split.

    What the journal has is not measured again. Cases are measured batch by batch, so that an
    interrupted run has few questions in all cases rather than all questions in few.
    """
    examples = yardstick.draw(split, images)
    groups = list(batches(yardstick, examples))
    digests = [batch_digest(batch) for batch in groups]
    missing = [
        [case for case in cases if journal.find(case.key, digest) is None] for digest in digests
    ]
    total = len(groups) * len(cases)
    progress.begin(total, total - sum(map(len, missing)))
    for batch, digest, todo in zip(groups, digests, missing, strict=True):
        if not todo:
            continue
        encoded = yardstick.encode(batch)
        records = []
        for case in todo:
            scores = encoded.score(case)
            records.append(_record(yardstick.model, digest, case, scores))
            progress.advance()
        # Together, because every append waits for the disk.
        journal.append(records)
    return Results(yardstick, examples, [_collect(case, digests, journal) for case in cases])


def _record(model: str, questions: str, case: Case, scores: CaseScores) -> BatchScores:
    answers = scores.answers
    return BatchScores(
        model=model,
        questions=questions,
        case=case.key,
        right="".join("01"[int(one)] for one in answers.right.tolist()),
        logprob=tuple(round(one, _DECIMALS) for one in answers.logprob.tolist()),
        tokens=scores.tokens,
    )


def _collect(case: Case, digests: Sequence[str], journal: YardstickJournal) -> CaseResult:
    records = [journal.find(case.key, digest) for digest in digests]
    found = [record for record in records if record is not None]
    return CaseResult(
        case,
        [digit == "1" for record in found for digit in record.right],
        [value for record in found for value in record.logprob],
        sum(record.tokens for record in found) / len(found),
    )
