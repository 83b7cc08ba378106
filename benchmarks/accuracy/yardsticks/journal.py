"""The journal of one yardstick: scores of each case and batch, from which a run is resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from vllm_autoprune.evaluation.journal import EvaluationError
from vllm_autoprune.record_file import FrozenModel, RecordFile


class BatchScores(FrozenModel):
    """Scores of one case on one batch of questions.

    ``right`` has a digit 0 or 1 for each question; ``model`` and ``questions`` identify what was
    measured, so that scores of other weights or questions are not used.
    """

    model: str
    questions: str
    case: str
    right: str
    logprob: tuple[float, ...]
    tokens: int


_RECORD: TypeAdapter[BatchScores] = TypeAdapter(BatchScores)


class YardstickJournal(RecordFile[BatchScores]):
    """Append-only file of the scores of one model; one process at a time may write it."""

    def __init__(self, path: Path, model: str) -> None:
        """Open or create the file; raises :class:`EvaluationError`."""
        super().__init__(path, _RECORD, EvaluationError)
        self._scores = {
            (record.case, record.questions): record
            for record in self.records
            if record.model == model
        }

    def find(self, case: str, questions: str) -> BatchScores | None:
        """The scores of a case on a batch, if they were measured."""
        return self._scores.get((case, questions))

    def append(self, records: Sequence[BatchScores]) -> None:
        """Write scores durably."""
        super().append(records)
        self._scores |= {(record.case, record.questions): record for record in records}
