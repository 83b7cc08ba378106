"""Comparison of search strategies: same evaluator and number of evaluations, several seeds.

Every search has its own ledger, so a comparison can be resumed, and a line in the results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from benchmarks.search.results import add_result, has_ended, ledger_path
from offline_search.dataset import Dataset
from offline_search.evaluator import EvaluationJob, Evaluator
from offline_search.history import Answers
from offline_search.ledger import Ledger
from offline_search.proposer import Proposer
from offline_search.replay import UnavailableBackend
from offline_search.report import ProgressLog
from offline_search.search import NothingMeasured, Search
from offline_search.settings import STRATEGIES_WITH_LISTS, Settings, Space
from offline_search.strategies import STRATEGIES
from vllm_autoprune.tpdsl.tokens import VisualTokens

WITHOUT_MODEL = "@none"
"""Behind the name of a strategy: the arm that uses no language model where the strategy may.

The name of a smaller space, such as ``@numbers``, may follow.
"""


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

    A strategy may end in :data:`WITHOUT_MODEL`, and in a space.

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
    used = [arm for arm in arms if WITHOUT_MODEL not in arm]
    return any(STRATEGIES[arm.partition("@")[0]](settings).uses_proposer for arm in used)


def space_of(arm: str) -> Space:
    """The space of an arm: the whole language unless its name ends in another."""
    return next((space for space in get_args(Space) if arm.endswith(f"@{space}")), "all")


async def _run_search(
    folder: Path,
    arm: str,
    seed: int,
    settings: Settings,
    evaluator: Evaluator,
    proposer: Proposer | None,
) -> None:
    own_settings = _settings_of(arm, seed, settings, evaluator.name)
    if has_ended(folder, arm, seed, own_settings):
        return
    progress = ProgressLog(lambda line: print(f"{arm} {seed}: {line}", flush=True))
    with Ledger(ledger_path(folder, arm, seed)) as ledger:
        unavailable = UnavailableBackend(own_settings.evaluator, evaluator.dataset)
        own_proposer = proposer if own_settings.proposer and proposer else unavailable
        search = Search(own_settings, ledger, evaluator, own_proposer, observer=progress)
        try:
            await search.run()
        except NothingMeasured as error:
            # The other arms go on: that a model writes nothing valid is a result as well.
            print(f"{arm} {seed}: {error}", flush=True)
    add_result(folder, arm, seed)


def _settings_of(arm: str, seed: int, settings: Settings, evaluator: str) -> Settings:
    """Settings of one search, without those of the language model that its strategy ignores."""
    strategy = arm.partition("@")[0]
    asks = WITHOUT_MODEL not in arm and STRATEGIES[strategy](settings).uses_proposer
    writes_lists = asks and strategy in STRATEGIES_WITH_LISTS
    return settings.model_copy(
        update={
            "strategy": strategy,
            "space": space_of(arm),
            "seed": seed,
            "evaluator": evaluator,
            "equal_evaluations": True,
            "proposer": settings.proposer if asks else "",
            "proposals_per_reply": settings.proposals_per_reply if writes_lists else 1,
        }
    )
