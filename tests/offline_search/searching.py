"""One search on scripted replies and a synthetic task, and what its ledger holds.

Knows nothing about what a search should find.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from offline_search.ledger import Ledger, read
from offline_search.proposers.asking import Limits
from offline_search.records import Chosen, Record
from offline_search.search import Search
from offline_search.settings import Settings
from tests.offline_search.replies import sound
from tests.offline_search.synthetic import ScriptedProposer, SyntheticEvaluator

R = TypeVar("R", bound=Record)

SOUND = sound(30)


async def searched(
    path: Path,
    settings: Settings,
    evaluator: SyntheticEvaluator,
    replies: Sequence[str | None] | None = None,
    limits: Limits | None = None,
) -> Chosen:
    """One search on a ledger, from wherever the ledger is."""
    proposer = ScriptedProposer(SOUND if replies is None else replies)
    settings = settings.model_copy(update={"evaluator": evaluator.name})
    with Ledger(path) as ledger:
        return await Search(settings, ledger, evaluator, proposer, limits or Limits()).run()


def digest(path: Path) -> str:
    """What a ledger holds, whatever its order and clocks."""
    with Ledger(path) as ledger:
        return ledger.digest()


def of_kind(path: Path, kind: type[R]) -> list[R]:
    """The records of one kind, in the order they came."""
    return [record for record in read(path) if isinstance(record, kind)]
