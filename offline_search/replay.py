"""A recorded search run again without any endpoint: every effect comes from the recording.

Knows nothing about what is recorded. The loop is the one of any search; who proposes and who
measures are only missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from offline_search.answers import Answers
from offline_search.evaluators.protocol import Job
from offline_search.examples import Dataset
from offline_search.ledger import Ledger
from offline_search.prompt import Messages
from offline_search.proposal import JsonObject
from offline_search.proposers.protocol import Reply
from offline_search.records import Chosen, Opened
from offline_search.search import Search
from offline_search.settings import Settings
from vllm_autoprune.errors import SearchError
from vllm_autoprune.tpdsl.tokens import VisualTokens


class Absent:
    """Evaluator and proposer of a replay: asked for anything, something was not recorded."""

    def __init__(self, name: str, dataset: Dataset) -> None:
        self.name = name
        self.dataset = dataset

    def probes(self) -> Sequence[VisualTokens]:
        """None: verdicts are recorded, behaviours with them."""
        return ()

    async def prepare(self) -> None:
        """Nothing to look for."""

    async def close(self) -> None:
        """Nothing to let go of."""

    async def evaluate(self, job: Job) -> Answers:
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


async def replay(recording: Path, into: Path, dataset: Dataset) -> tuple[Chosen, str, str]:
    """The winner, and the digests of the recording and of the ledger that the replay wrote.

    Raises :class:`SearchError` where a step does not follow from what is recorded.
    """
    with Ledger(recording) as recorded:
        absent = Absent(settings_of(recorded).evaluator, dataset)
        with Ledger(into, recorded) as ledger:
            search = Search(settings_of(recorded), ledger, absent, absent)
            chosen = await search.run()
            return chosen, recorded.digest(), ledger.digest()


def settings_of(ledger: Ledger) -> Settings:
    """What a ledger's search was asked to do."""
    opened = ledger.find(Opened, "opened")
    if opened is None:
        raise SearchError(f"ledger {ledger.path}: holds no search -> give one that has begun")
    return opened.settings
