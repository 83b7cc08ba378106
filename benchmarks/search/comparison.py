"""Comparison of search strategies: same evaluator and number of evaluations, several seeds.

Every search has its own ledger, so a comparison can be resumed, and its table can be made again
from the ledgers alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from offline_search.candidates.components import JsonObject
from offline_search.dataset import Dataset
from offline_search.evaluation.answers import Answers
from offline_search.evaluation.evaluator import EvaluationJob, Evaluator
from offline_search.evaluation.winner_selection import NothingMeasured
from offline_search.ledger import Ledger, read_ledger
from offline_search.ledger.records import ReplyRecord, WinnerRecord
from offline_search.proposers.prompt import Messages
from offline_search.proposers.proposal_client import Proposer, Reply
from offline_search.replay import UnavailableBackend
from offline_search.report import SearchReport, read_report
from offline_search.report.markdown import table
from offline_search.report.progress import ProgressLog
from offline_search.search import Search
from offline_search.settings import STRATEGIES_WITH_LISTS, STRATEGIES_WITHOUT_MENU, Settings
from offline_search.strategies import STRATEGIES
from vllm_autoprune.errors import SearchError
from vllm_autoprune.tpdsl.tokens import VisualTokens

_CURVE_SHARES = (0.1, 0.2, 0.4, 1.0)

# Two-sided 95 % quantiles of Student's t distribution, by degrees of freedom.
_T_QUANTILES = {
    1: 12.71,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
}


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


def ledger_path(folder: Path, strategy: str, seed: int) -> Path:
    """Ledger of one search of a comparison."""
    return folder / f"{strategy}-{seed}.jsonl"


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


@dataclass(frozen=True)
class Outcome:
    """Result of one finished search."""

    seed: int
    winner: WinnerRecord
    evaluated: int
    spent: int


def read_outcomes(folder: Path, strategy: str, seeds: Sequence[int]) -> list[Outcome]:
    """Results of a strategy's finished searches."""
    return [
        Outcome(seed, winner, report.statuses.get("evaluated", 0), report.rows[-1].spent)
        for seed, report in _read_reports(folder, strategy, seeds).items()
        if (winner := report.winner) is not None
    ]


def _read_reports(folder: Path, strategy: str, seeds: Sequence[int]) -> dict[int, SearchReport]:
    """Reports of a strategy's searches that have begun, by seed."""
    paths = {seed: ledger_path(folder, strategy, seed) for seed in seeds}
    return {
        seed: read_report(read_ledger(path))
        for seed, path in paths.items()
        if path.exists() and path.stat().st_size
    }


def as_markdown(folder: Path, strategies: Sequence[str], seeds: Sequence[int]) -> str:
    """Tables of test results and learning curves, and paired differences between neighbours."""
    return "\n".join(_lines(folder, strategies, seeds)) + "\n"


def _lines(folder: Path, strategies: Sequence[str], seeds: Sequence[int]) -> Iterator[str]:
    results = {strategy: read_outcomes(folder, strategy, seeds) for strategy in strategies}
    reports = {strategy: _read_reports(folder, strategy, seeds) for strategy in strategies}
    head = [
        "strategy", "seeds", "test objective", "gain over base", "accuracy %", "answers",
        "invalid %",
    ]  # fmt: skip
    rows = [
        [*_result_row(strategy, outcomes), _invalid_share(reports[strategy].values())]
        for strategy, outcomes in results.items()
    ]
    yield from table(head, rows, "lrrrrrr")
    yield ""
    curves = [
        [strategy, *_curve_cells(reports[strategy].values())]
        for strategy in strategies
        if results[strategy]
    ]
    head = ["search objective after", *(f"{share:.0%}" for share in _CURVE_SHARES)]
    yield from table(head, curves, "lrrrr")
    yield ""
    for first, second in pairwise(strategies):
        if differences := _paired_differences(results[first], results[second]):
            yield f"- {first} less {second}, paired by seed: {format_mean(differences)}"


def _paired_differences(first: Sequence[Outcome], second: Sequence[Outcome]) -> list[float]:
    """Differences of the test objectives, for seeds that both strategies have finished."""
    others = {outcome.seed: outcome.winner.test.objective.value for outcome in second}
    return [
        outcome.winner.test.objective.value - others[outcome.seed]
        for outcome in first
        if outcome.seed in others
    ]


def _result_row(strategy: str, outcomes: Sequence[Outcome]) -> list[str]:
    """Test results of a strategy, mean over seeds."""
    if not outcomes:
        return [strategy, "0", *[""] * 4]
    tests = [outcome.winner.test for outcome in outcomes]
    return [
        strategy,
        str(len(outcomes)),
        format_mean([test.objective.value for test in tests]),
        format_mean([test.gain.value for test in tests]),
        format_mean([100 * test.accuracy for test in tests], 1),
        f"{statistics.mean(outcome.spent for outcome in outcomes):.0f}",
    ]


def _invalid_share(reports: Iterable[SearchReport]) -> str:
    """Share of all candidates that were invalid or unsafe, also of searches without a winner."""
    statuses: Counter[str] = Counter()
    for report in reports:
        statuses.update(report.statuses)
    invalid = statuses["invalid"] + statuses["unsafe"]
    return f"{100 * invalid / statuses.total():.0f}" if statuses else ""


def _curve_cells(reports: Iterable[SearchReport]) -> list[str]:
    """Best objective after shares of the evaluations, mean over finished searches."""
    finished = [report for report in reports if report.winner is not None]
    cells = []
    for share in _CURVE_SHARES:
        best = [_best_after(report, share) for report in finished]
        known = [value for value in best if value is not None]
        cells.append(f"{statistics.mean(known):.4f}" if len(known) == len(best) else "")
    return cells


def _best_after(report: SearchReport, share: float) -> float | None:
    """Best objective after a share of all answers."""
    limit = share * report.rows[-1].spent
    values = [value for spent, value in report.curve() if spent <= limit]
    return values[-1] if values else None


def format_mean(values: Sequence[float], digits: int = 4) -> str:
    """Mean with its 95 % confidence interval by Student's t; only the mean of a single value."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    width = _T_QUANTILES[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.{digits}f} ± {width:.{digits}f}"


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
