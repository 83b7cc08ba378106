"""Comparison of search strategies: same evaluator and number of evaluations, several seeds.

Every search has its own ledger, so a comparison can be resumed, and a line in the results.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.search.results import add_result, has_ended, ledger_path
from offline_search.candidates.components import JsonObject
from offline_search.dataset import Dataset
from offline_search.evaluation.answers import Answers
from offline_search.evaluation.evaluator import EvaluationJob, Evaluator
from offline_search.evaluation.winner_selection import NothingMeasured
from offline_search.ledger import Ledger, read_ledger
from offline_search.ledger.records import ReplyRecord
from offline_search.proposers.prompt import Messages
from offline_search.proposers.proposal_client import Proposer, Reply
from offline_search.replay import UnavailableBackend
from offline_search.report.progress import ProgressLog
from offline_search.search import Search
from offline_search.settings import STRATEGIES_WITH_LISTS, STRATEGIES_WITHOUT_MENU, Settings
from offline_search.strategies import STRATEGIES
from vllm_autoprune.errors import SearchError
from vllm_autoprune.tpdsl.tokens import VisualTokens

WITHOUT_MODEL = "@none"
"""Behind the name of a strategy: the arm that uses no language model where the strategy may."""


class CachingEvaluator:
    """Evaluator that caches answers, shared by the searches of a comparison."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._cache: dict[EvaluationJob, Answers] = {}
        self._probes: Sequence[VisualTokens] | None = None

    @property
    def name(self) -> str:
        """Name of the wrapped evaluator."""
        return self._evaluator.name

    @property
    def dataset(self) -> Dataset:
        """Data set of the wrapped evaluator."""
        return self._evaluator.dataset

    def probes(self) -> Sequence[VisualTokens]:
        """Probes of the wrapped evaluator, computed once."""
        if self._probes is None:
            self._probes = self._evaluator.probes()
        return self._probes

    async def prepare(self) -> None:
        """Prepare the wrapped evaluator."""
        await self._evaluator.prepare()

    async def evaluate(self, job: EvaluationJob) -> Answers:
        """Cached answers, or those of the wrapped evaluator."""
        if job not in self._cache:
            self._cache[job] = await self._evaluator.evaluate(job)
        return self._cache[job]

    async def close(self) -> None:
        """Close the wrapped evaluator."""
        await self._evaluator.close()


async def run_comparison(
    folder: Path,
    strategies: Sequence[str],
    seeds: Sequence[int],
    settings: Settings,
    evaluator: Evaluator,
    proposer: Proposer | None,
    concurrency: int = 1,
) -> None:
    """Run all searches that have not finished, seed by seed.

    A strategy may end in :data:`WITHOUT_MODEL`.

    ``concurrency`` searches run together, because a small model answers 25 prompts in little more
    time than 5. Searches are independent, so this changes no record except its clock.
    """
    slots = asyncio.Semaphore(concurrency)

    async def run(seed: int, arm: str) -> None:
        async with slots:
            await _run_search(folder, arm, seed, settings, evaluator, proposer)

    await asyncio.gather(*(run(seed, strategy) for seed in seeds for strategy in strategies))


def needs_proposer(arms: Sequence[str], settings: Settings) -> bool:
    """Whether any arm of a comparison asks a language model."""
    used = [arm for arm in arms if not arm.endswith(WITHOUT_MODEL)]
    return any(STRATEGIES[arm](settings).uses_proposer for arm in used)


async def _run_search(
    folder: Path,
    arm: str,
    seed: int,
    settings: Settings,
    evaluator: Evaluator,
    proposer: Proposer | None,
) -> None:
    strategy = arm.removesuffix(WITHOUT_MODEL)
    uses_proposer = strategy == arm and STRATEGIES[strategy](settings).uses_proposer
    writes_lists = uses_proposer and strategy in STRATEGIES_WITH_LISTS
    own_settings = settings.model_copy(
        update={
            "strategy": strategy,
            "seed": seed,
            "evaluator": evaluator.name,
            "equal_evaluations": True,
            "proposer": settings.proposer if uses_proposer else "",
            "menu": settings.menu
            if uses_proposer and strategy not in STRATEGIES_WITHOUT_MENU
            else 0,
            "proposals_per_reply": settings.proposals_per_reply if writes_lists else 1,
        }
    )
    if has_ended(folder, arm, seed, own_settings):
        return
    progress = ProgressLog(lambda line: print(f"{arm} {seed}: {line}", flush=True))
    with Ledger(ledger_path(folder, arm, seed)) as ledger:
        unavailable = UnavailableBackend(own_settings.evaluator, evaluator.dataset)
        own_proposer = proposer if uses_proposer and proposer else unavailable
        search = Search(own_settings, ledger, evaluator, own_proposer, observer=progress)
        try:
            await search.run()
        except NothingMeasured as error:
            # The other arms go on: that a model writes nothing valid is a result as well.
            print(f"{arm} {seed}: {error}", flush=True)
    add_result(folder, arm, seed)


class RecordedProposer:
    """Proposer that returns first replies recorded by earlier searches, instead of running a model.

    The reply is chosen by a hash of request and seed: searches are repeatable, but the replies do
    not depend on the prompt. Comparisons with it show how strategies use proposals, not what a
    model learns from the history.
    """

    def __init__(self, ledgers: Sequence[Path]) -> None:
        """Raises :class:`SearchError` if the ledgers hold no reply."""
        self._replies = [
            Reply(record.text, record.failure, record.cost)
            for ledger in ledgers
            for record in read_ledger(ledger)
            if isinstance(record, ReplyRecord) and record.attempt == "first"
        ]
        if not self._replies:
            raise SearchError(
                f"{', '.join(map(str, ledgers))}: no reply is recorded -> give ledgers of searches "
                "with a proposer"
            )

    def __len__(self) -> int:
        return len(self._replies)

    async def prepare(self) -> None:
        """Do nothing: recorded replies need no endpoint."""

    async def close(self) -> None:
        """Do nothing: no connection is open."""

    async def reply(self, messages: Messages, schema: JsonObject | None, seed: int) -> Reply:
        """One of the replies, chosen by request and seed."""
        request = f"{seed} {json.dumps(messages)}"
        index = int.from_bytes(hashlib.sha256(request.encode()).digest()[:8], "big")
        return self._replies[index % len(self._replies)]
