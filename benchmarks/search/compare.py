"""Strategies compared on mini-LLaVA: same evaluator, same evaluations, several seeds.

Knows nothing about what a strategy does. Every search has a ledger of its own, so a comparison that
is stopped goes on where it was, and its table can be made again from the ledgers alone.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from offline_search.answers import Answers
from offline_search.evaluators.protocol import Evaluator, Job
from offline_search.examples import Dataset
from offline_search.ledger import Ledger, read
from offline_search.progress import Progress
from offline_search.proposers.protocol import Proposer
from offline_search.records import Chosen
from offline_search.replay import Absent
from offline_search.report import Reading, reading
from offline_search.report.markdown import table
from offline_search.search import Search
from offline_search.settings import UNLISTED, Settings
from offline_search.strategies import STRATEGIES
from vllm_autoprune.tpdsl.tokens import VisualTokens

_SHARES = (0.1, 0.2, 0.4, 1.0)

# Two-sided 95 % of Student's t, by degrees of freedom.
_T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


class Remembering:
    """An evaluator that answers a job once, whichever search asks for it."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._known: dict[Job, Answers] = {}
        self._probes: Sequence[VisualTokens] | None = None

    @property
    def name(self) -> str:
        """The evaluator's own."""
        return self._evaluator.name

    @property
    def dataset(self) -> Dataset:
        """The evaluator's own."""
        return self._evaluator.dataset

    def probes(self) -> Sequence[VisualTokens]:
        """The evaluator's own."""
        if self._probes is None:
            self._probes = self._evaluator.probes()
        return self._probes

    async def prepare(self) -> None:
        """As the evaluator does."""
        await self._evaluator.prepare()

    async def evaluate(self, job: Job) -> Answers:
        """From memory where it is there."""
        if job not in self._known:
            self._known[job] = await self._evaluator.evaluate(job)
        return self._known[job]

    async def close(self) -> None:
        """As the evaluator does."""
        await self._evaluator.close()


def ledger_of(folder: Path, strategy: str, seed: int) -> Path:
    """Where one search of a comparison is kept."""
    return folder / f"{strategy}-{seed}.jsonl"


async def compare(
    folder: Path,
    strategies: Sequence[str],
    seeds: Sequence[int],
    settings: Settings,
    evaluator: Evaluator,
    proposer: Proposer | None,
    at_once: int = 1,
) -> None:
    """Run every search that has not ended; seed by seed, so that what there is can be compared.

    ``at_once`` of them are under way together: a small model answers 25 prompts in hardly more time
    than 5. No search learns from another, so this changes no record but its clock.
    """
    room = asyncio.Semaphore(at_once)

    async def run(seed: int, strategy: str) -> None:
        async with room:
            await _search(folder, strategy, seed, settings, evaluator, proposer)

    await asyncio.gather(*(run(seed, strategy) for seed in seeds for strategy in strategies))


async def _search(
    folder: Path,
    strategy: str,
    seed: int,
    settings: Settings,
    evaluator: Evaluator,
    proposer: Proposer | None,
) -> None:
    asks = STRATEGIES[strategy](settings).asks
    this = settings.model_copy(
        update={
            "strategy": strategy,
            "seed": seed,
            "evaluator": evaluator.name,
            "equal_evaluations": True,
            "proposer": settings.proposer if asks else "",
            "menu": 0 if strategy in UNLISTED or not asks else settings.menu,
        }
    )
    say = Progress(lambda line: print(f"{strategy} {seed}: {line}", flush=True))
    with Ledger(ledger_of(folder, strategy, seed)) as ledger:
        asked = proposer if asks and proposer else Absent(this.evaluator, evaluator.dataset)
        await Search(this, ledger, evaluator, asked, watch=say).run()


@dataclass(frozen=True)
class Outcome:
    """One search that has ended."""

    seed: int
    chosen: Chosen
    evaluated: int
    spent: int


def outcomes(folder: Path, strategy: str, seeds: Sequence[int]) -> list[Outcome]:
    """The searches of a strategy that have ended."""
    found = []
    for seed in seeds:
        path = ledger_of(folder, strategy, seed)
        known = reading(read(path)) if path.exists() and path.stat().st_size else None
        if known is not None and known.chosen is not None:
            spent = known.rows[-1].spent
            found.append(Outcome(seed, known.chosen, known.statuses.get("evaluated", 0), spent))
    return found


def as_markdown(folder: Path, strategies: Sequence[str], seeds: Sequence[int]) -> str:
    """Test figures over seeds, and differences between neighbours of the list, paired by seed."""
    return "\n".join(_lines(folder, strategies, seeds)) + "\n"


def _lines(folder: Path, strategies: Sequence[str], seeds: Sequence[int]) -> Iterator[str]:
    found = {strategy: outcomes(folder, strategy, seeds) for strategy in strategies}
    rows = []
    for strategy, ended in found.items():
        if not ended:
            rows.append([strategy, "0", *[""] * 4])
            continue
        rows.append([
            strategy,
            str(len(ended)),
            spread([one.chosen.test.objective.value for one in ended]),
            spread([one.chosen.test.gain.value for one in ended]),
            spread([100 * one.chosen.test.accuracy for one in ended], 1),
            f"{statistics.mean(one.spent for one in ended):.0f}",
        ])  # fmt: skip
    head = ["strategy", "seeds", "test objective", "gain over base", "accuracy %", "answers"]
    yield from table(head, rows, "lrrrrr")
    yield ""
    yield from table(["search objective after", *(f"{s:.0%}" for s in _SHARES)],
                     _curves(folder, [s for s, ended in found.items() if ended], seeds),
                     "lrrrr")  # fmt: skip
    yield ""
    for better, worse in pairwise(strategies):
        pairs = {one.seed: one.chosen.test.objective.value for one in found[worse]}
        gaps = [one.chosen.test.objective.value - pairs[one.seed]
                for one in found[better] if one.seed in pairs]  # fmt: skip
        if gaps:
            yield f"- {better} less {worse}, paired by seed: {spread(gaps)}"


def _curves(folder: Path, strategies: Sequence[str], seeds: Sequence[int]) -> list[list[str]]:
    """The best objective after shares of the evaluations, mean over seeds."""
    rows = []
    for strategy in strategies:
        paths = [ledger_of(folder, strategy, seed) for seed in seeds]
        known = [reading(read(path)) for path in paths if path.exists()]
        whole = [found for found in known if found.chosen is not None]
        cells = []
        for share in _SHARES:
            best = [_best_by(found, share) for found in whole]
            cells.append("" if None in best else f"{statistics.mean(b or 0.0 for b in best):.4f}")
        rows.append([strategy, *cells])
    return rows


def _best_by(found: Reading, share: float) -> float | None:
    """The best objective by the time that a share of all answers was spent."""
    values = [value for spent, value in found.curve() if spent <= share * found.rows[-1].spent]
    return values[-1] if values else None


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Mean and its 95 % interval by Student's t; the bare mean where there is one value."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    width = _T[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.{digits}f} ± {width:.{digits}f}"
