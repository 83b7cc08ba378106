"""Replay of a recorded search: every reply, verdict and evaluation comes from its ledger."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from offline_search.candidates.components import JsonObject
from offline_search.dataset import Dataset
from offline_search.evaluation.answers import Answers
from offline_search.evaluation.evaluator import EvaluationJob
from offline_search.ledger import Ledger
from offline_search.ledger.records import SettingsRecord, WinnerRecord
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

    Raises :class:`SearchError` if a step needs a request that was not recorded.
    """
    with Ledger(recording) as recorded:
        settings = recorded_settings(recorded)
        backend = UnavailableBackend(settings.evaluator, dataset)
        with Ledger(into, recorded) as ledger:
            winner = await Search(settings, ledger, backend, backend).run()
            return winner, recorded.digest(), ledger.digest()


def recorded_settings(ledger: Ledger) -> Settings:
    """The settings of a ledger's search."""
    record = ledger.find(SettingsRecord, "opened")
    if record is None:
        raise SearchError(f"ledger {ledger.path}: contains no search -> give one that has begun")
    return record.settings
