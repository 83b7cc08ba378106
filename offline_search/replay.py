"""Replay of a recorded search: every reply, verdict and evaluation comes from its ledger."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from offline_search.candidates.components import JsonObject
from offline_search.dataset import Dataset
from offline_search.evaluation.answers import Answers
from offline_search.evaluation.evaluator import EvaluationJob
from offline_search.ledger import Ledger, read_ledger
from offline_search.ledger.ledger import digest_records
from offline_search.ledger.records import Record, SettingsRecord, WinnerRecord
from offline_search.proposers.prompt import Messages
from offline_search.proposers.proposal_client import Reply
from offline_search.search import Search
from offline_search.settings import Settings
from vllm_autoprune.errors import SearchError
from vllm_autoprune.tpdsl.tokens import VisualTokens


class UnavailableBackend:
    """Evaluator and proposer that fail every request, because a replay needs none of them."""

    def __init__(self, name: str, dataset: Dataset) -> None:
        self.name = name
        self.dataset = dataset

    def probes(self) -> Sequence[VisualTokens]:
        """No probes, because fingerprints of selections are recorded."""
        return ()

    async def prepare(self) -> None:
        """Always succeeds."""

    async def close(self) -> None:
        """Does nothing."""

    async def evaluate(self, job: EvaluationJob) -> Answers:
        """Raises :class:`SearchError`."""
        raise SearchError(
            f"the recording has no evaluation of examples {job.start} to {job.stop} of the "
            f"{job.split} split at K = {job.budget} -> resume the recorded search to its end first"
        )

    async def reply(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
        """Raises :class:`SearchError`."""
        raise SearchError(
            "the recording has no reply to this request -> resume the recorded search to its end"
        )


async def replay(recording: Path, into: Path, dataset: Dataset) -> tuple[WinnerRecord, str, str]:
    """Replay a recording into a new ledger; returns the winner and the digests of both ledgers.

    The recording is only read. Raises :class:`SearchError` if it was made on other data, or if a
    step needs a request that was not recorded.
    """
    recorded = read_ledger(recording)
    settings = recorded_settings(recording, recorded)
    _require_recorded_data(recording, settings, dataset)
    backend = UnavailableBackend(settings.evaluator, dataset)
    with Ledger(into, recorded) as ledger:
        winner = await Search(settings, ledger, backend, backend).run()
        return winner, digest_records(recorded), ledger.digest()


def recorded_settings(path: Path, records: Sequence[Record]) -> Settings:
    """The settings of the search whose ledger at ``path`` has these records."""
    for record in records:
        if isinstance(record, SettingsRecord):
            return record.settings
    raise SearchError(f"ledger {path}: contains no search -> give one that has begun")


def _require_recorded_data(recording: Path, settings: Settings, dataset: Dataset) -> None:
    # Every evaluator of the package and of the benchmarks ends its name so; others are not checked.
    named = re.search(r"data ([0-9a-f]{12})$", settings.evaluator)
    if named is not None and not dataset.digest.startswith(named[1]):
        raise SearchError(
            f"ledger {recording}: its search had other questions than {dataset.folder} gives "
            f"(data {named[1]}, not {dataset.digest[:12]}) -> give the data folder and the "
            "--images of the recorded search"
        )
