"""Rewrite what recorded searches derive: ``python -m tests.offline_search.rewrite_recorded``.

Replies, verdicts and evaluations stay; prompts, whose hashes replies have, and all that follows
from them are those of today. Prints the digests that test_search.py names. Fails where a prompt
change makes the search ask what is not recorded.
"""

from __future__ import annotations

import asyncio
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.search.study import PROPOSED, read_questions
from offline_search.components import JsonObject
from offline_search.ledger import (
    EvaluationRecord,
    Ledger,
    Record,
    ReplyRecord,
    SettingsRecord,
    VerdictRecord,
    digest_records,
    read_ledger,
    select_records,
)
from offline_search.prompt import Messages
from offline_search.proposer import Reply
from offline_search.search import Search, replay_on
from tests.offline_search.synthetic import SyntheticEvaluator, dataset

RECORDED = Path(__file__).parent / "recorded"


class RecordedProposer:
    """Gives the recorded reply to whatever is asked at its place in the search."""

    def __init__(self, replies: list[ReplyRecord]) -> None:
        self._replies = {record.key: record for record in replies}

    async def reply(
        self, messages: Messages, schema: JsonObject | None, seed: int
    ) -> Reply:
        number, index = divmod(seed, 1009)  # as the seed of a request is made
        attempt = "first" if len(messages) == 2 else "repair"
        record = self._replies[f"reply/{number}/{index}/{attempt}"]
        return Reply(record.text, record.failure, record.cost)


async def rewrite(recording: Path) -> str:
    """Rewrite one recording; returns its digest."""
    records = read_ledger(recording)
    (opened,) = select_records(records, SettingsRecord)
    measured: list[Record] = [
        *select_records(records, EvaluationRecord),
        *select_records(records, VerdictRecord),
    ]
    proposer = RecordedProposer(select_records(records, ReplyRecord))
    with tempfile.TemporaryDirectory() as folder:
        evaluator = SyntheticEvaluator(dataset(Path(folder)))
        path = Path(folder) / "new"
        with Ledger(path, measured) as ledger:
            await Search(opened.settings, ledger, evaluator, proposer).run()
            assert not evaluator.jobs, "asks what is not recorded"
            recording.write_bytes(path.read_bytes())
            return digest_records(ledger)


if __name__ == "__main__":
    for recording in sorted(RECORDED.glob("*.jsonl")):
        print(recording.stem, asyncio.run(rewrite(recording))[:12])
    # The requests of these stay what a model was sent once.
    for recording in sorted(PROPOSED.glob("*.jsonl")):
        with tempfile.TemporaryDirectory() as folder:
            again = Path(folder) / "new"
            read = partial(read_questions, recording)
            replayed = asyncio.run(replay_on(read, recording, again)).replayed
            print(recording.stem, replayed[:12])
            recording.write_bytes(again.read_bytes())
