"""Comparison of search strategies: same evaluator and number of evaluations, several seeds.

Every search has its own ledger, so a comparison can be resumed, and a line in the results. The
published comparison is a study: each yardstick and K has its own folder, so that it can be resumed,
extended by strategies, and printed again, for which its results are enough, without the ledgers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from benchmarks.common.report import log_progress
from benchmarks.search.evaluator import YardstickEvaluator
from benchmarks.search.results import (
    BASE,
    Confirmed,
    add_result,
    has_ended,
    ledger_path,
    read_confirmation,
    read_results,
    require_model,
    results_of,
    write_confirmation,
)
from benchmarks.search.tables import format_confirmed, format_searches, format_states
from benchmarks.yardsticks import open_yardstick
from offline_search.candidates import base_state, paper_state
from offline_search.components import Candidate
from offline_search.dataset import Dataset, Split
from offline_search.evaluator import EvaluationJob, Evaluator
from offline_search.history import Answers, relative_logprob
from offline_search.ledger import Ledger
from offline_search.proposer import Proposer
from offline_search.replay import UnavailableBackend
from offline_search.report import ProgressLog
from offline_search.search import NothingMeasured, Search
from offline_search.settings import STRATEGIES_WITH_LISTS, Settings, Space
from offline_search.strategies import STRATEGIES
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import VisualTokens

WITHOUT_MODEL = "@none"
"""Behind the name of a strategy: the arm that uses no language model where the strategy may.

The name of a smaller space, such as ``@numbers``, may follow.
"""

WITHOUT_PROPOSER = ("random", "tpe", f"autoprune+{WITHOUT_MODEL}")
"""Strategies that ask no language model."""

ARMS = (
    *WITHOUT_PROPOSER,
    "autoprune+",
    "autoprune",
    "evoprompting-states",
    "openevolve-states",
    "evoprompting-code",
    "openevolve-code",
)

REFERENCES = ("tpe", f"autoprune+{WITHOUT_MODEL}")
"""The strategies that the others are compared with, where they are among them."""

ABLATIONS = tuple(
    f"autoprune+{WITHOUT_MODEL}@{space}"
    for space in ("released", "without-diversity", "without-fusion", "without-anchoring")
)
"""The searches of the component table: the full policy, and each smaller space."""

PER_ROUND = 5

BASE_POLICIES = {"minillava": "visionzip", "miniqwen": "divprune"}
"""Base policy of each yardstick: one that does not read the question, which leaves much to find."""

RELEASED = {"minillava": ("cdpruner", 16), "miniqwen": ("divprune", 8)}
"""Base policy and K of searches around the released policy, which refines CDPruner; mini-Qwen3-VL
has no CLIP for that."""

_IMAGES: dict[Split, int] = {"search": 128, "validation": 128, "test": 128}
_CONFIRMING_IMAGES: dict[Split, int] = {"search": 1, "validation": 1, "test": 600}
"""Images of the test split that winners are confirmed on, each with one question.

The first of them are those of :data:`_IMAGES`."""

_BLOCKS = 24
"""Blocks of questions whose means are kept, for intervals over questions."""


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


def run_comparison(
    folder: Path,
    arms: Sequence[str],
    seeds: Sequence[int],
    settings: Settings,
    evaluator: Evaluator,
    connect: Callable[[], Proposer] | None,
    concurrency: int = 1,
) -> None:
    """Run all searches that have not finished, seed by seed.

    An arm is a strategy that may end in :data:`WITHOUT_MODEL`, and in a space. ``connect`` opens
    the proposer. ``concurrency`` searches run together, because a small model answers 25 prompts in
    little more time than 5. Searches are independent, so this changes no record except its clock.
    """

    async def run() -> None:
        slots = asyncio.Semaphore(concurrency)
        proposer = connect() if connect else None

        async def run_next(seed: int, arm: str) -> None:
            async with slots:
                await _run_search(folder, arm, seed, settings, evaluator, proposer)

        try:
            await asyncio.gather(*(run_next(seed, arm) for seed in seeds for arm in arms))
        finally:
            if proposer is not None:
                await proposer.close()

    asyncio.run(run())


def needs_proposer(arms: Sequence[str], settings: Settings) -> bool:
    """Whether any arm of a comparison asks a language model."""
    used = [arm for arm in arms if WITHOUT_MODEL not in arm]
    return any(STRATEGIES[arm.partition("@")[0]](settings).uses_proposer for arm in used)


def _space_of(arm: str) -> Space:
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
            "space": _space_of(arm),
            "seed": seed,
            "evaluator": evaluator,
            "equal_evaluations": True,
            "proposer": settings.proposer if asks else "",
            "proposals_per_reply": settings.proposals_per_reply if writes_lists else 1,
        }
    )


async def _measure(
    evaluator: Evaluator, winner: Candidate, budgets: Sequence[int], full: Answers
) -> Confirmed:
    count = len(evaluator.dataset.examples("test"))
    answers = [
        await evaluator.evaluate(EvaluationJob(winner, budget, "test", 0, count))
        for budget in budgets
    ]
    objective = np.mean([relative_logprob(each, full) for each in answers], axis=0)
    right = sum(sum(each.right) for each in answers)
    return Confirmed(
        questions=count,
        evaluator=evaluator.name,
        digest=winner.digest,
        objective=round(float(objective.mean()), 6),
        accuracy=round(right / (count * len(budgets)), 6),
        blocks=tuple(
            round(float(block.mean()), 4)
            for block in np.array_split(objective, min(_BLOCKS, count))
        ),
    )


def confirm(
    folder: Path, evaluator: Evaluator, states: Mapping[str, PruningState] | None = None
) -> dict[str, Confirmed]:
    """Measure what was not measured yet, every winner and other ``states`` at their own K.

    The file is written after each. Raises :class:`SearchError` for a search on another model than
    the evaluator's.
    """
    confirmed = read_confirmation(folder)
    count = len(evaluator.dataset.examples("test"))
    full: Answers | None = None
    candidates: dict[str, tuple[Candidate, Sequence[int]]] = {
        name: (state, state.budget.range()[:1]) for name, state in (states or {}).items()
    }
    for name, result in read_results(folder).items():
        require_model(result, evaluator.name)
        if result.winner is not None:
            candidates[name] = result.winner.load(), result.settings.budgets
    for name, (winner, budgets) in candidates.items():
        known = confirmed.get(name)
        if known and (known.digest, known.evaluator) == (winner.digest, evaluator.name):
            continue
        if full is None:
            full = asyncio.run(evaluator.evaluate(EvaluationJob(None, 0, "test", 0, count)))
        measured = _measure(evaluator, winner, budgets, full)
        confirmed[name] = asyncio.run(measured)
        log_progress(f"{name}: {confirmed[name].objective:+.4f}")
        write_confirmation(folder, confirmed)
    return confirmed


@dataclass(frozen=True)
class Study:
    """One study: its folder, arms and seeds, and the evaluations of a search in rounds of five.

    ``concurrency`` searches run together. ``base_policy`` takes the place of the yardstick's own.
    With ``quotas``, the released policy is measured with each of these q_e.
    """

    folder: Path
    arms: Sequence[str]
    seeds: Sequence[int]
    rounds: int
    proposer: str = ""
    proposals_per_reply: int = 1
    concurrency: int = 1
    base_policy: str = ""
    quotas: Sequence[int] = ()

    def needs_proposer(self, names: Sequence[str], budgets: Sequence[int]) -> bool:
        """Whether a search that asks a language model has not ended on these yardsticks and K."""
        arms = {
            arm
            for name in names
            for budget in budgets
            for arm in self._unfinished_arms(name, budget)
        }
        return needs_proposer(sorted(arms), self._settings(1, BASE_POLICIES["minillava"]))

    def run(self, name: str, budget: int, connect: Callable[[], Proposer] | None) -> str:
        """Run what is missing on one yardstick at one K; the tables in Markdown.

        ``connect`` opens the proposer, once for each comparison, because each has its event loop.
        """
        folder = self._cell(name, budget)
        folder.mkdir(parents=True, exist_ok=True)
        yardstick, base = open_yardstick(name), self.base_policy or BASE_POLICIES[name]
        own = YardstickEvaluator(yardstick, _IMAGES, each=1, base_policy=base)
        settings = self._settings(budget, base)
        evaluator = CachingEvaluator(own)
        run_comparison(
            folder, self.arms, self.seeds, settings, evaluator, connect, self.concurrency
        )
        confirming = YardstickEvaluator(yardstick, _CONFIRMING_IMAGES, each=1, base_policy=base)
        swept = {f"q_e = {q}": paper_state(settings, q) for q in self.quotas if q <= budget}
        states = {BASE: base_state(settings), **swept}
        confirm(folder, CachingEvaluator(confirming), states)
        tables = format_tables(folder, self.arms, self.seeds)
        if swept:
            tables += f"\n{format_states(folder, swept)}"
        return f"## {yardstick.name}, K = {budget}\n\n{tables}"

    def _cell(self, name: str, budget: int) -> Path:
        """Folder of one yardstick and K."""
        return self.folder / f"{name}-k{budget}"

    def _unfinished_arms(self, name: str, budget: int) -> list[str]:
        known = read_results(self._cell(name, budget))
        return [a for a in self.arms if len(results_of(known, a, self.seeds)) < len(self.seeds)]

    def _settings(self, budget: int, base_policy: str) -> Settings:
        return Settings(
            rounds=self.rounds,
            per_round=PER_ROUND,
            base_policy=base_policy,
            budgets=(budget,),
            proposer=self.proposer,
            proposals_per_reply=self.proposals_per_reply,
        )


def format_tables(folder: Path, arms: Sequence[str], seeds: Sequence[int]) -> str:
    """The searches of a folder in Markdown; their winners beside each of :data:`REFERENCES`.

    Winners that were not confirmed are left out. Spaces are compared by strategy, each with the
    largest.
    """
    tables = [format_searches(folder, arms, seeds)]
    groups = {arm: list(arms) for arm in REFERENCES if arm in arms} or {arms[0]: list(arms)}
    if any(_space_of(arm) != "all" for arm in arms):
        strategies: dict[str, list[str]] = {}
        for arm in arms:
            strategies.setdefault(arm.removesuffix(f"@{_space_of(arm)}"), []).append(arm)
        groups = {group[0]: group for group in strategies.values()}
    if read_confirmation(folder):
        tables += [format_confirmed(folder, g, seeds, arm) for arm, g in groups.items()]
    return "\n".join(tables)
